"""A matplotlib backend for ranks: ``plt.show()`` and the end of a cell show figures in the notebook.

Ranks inherit the notebook's ``MPLBACKEND``, and its inline backend needs a kernel.
"""

from __future__ import annotations

from typing import Any

from matplotlib import _pylab_helpers
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from nblaunch.ranks import rank_display


class FigureManager(FigureManagerBase):
    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        show_open_figures()


class FigureCanvas(FigureCanvasAgg):
    """The canvas class; matplotlib requires a backend module to have this name."""

    manager_class: Any = FigureManager


def show_open_figures() -> None:
    managers = _pylab_helpers.Gcf.get_all_fig_managers()
    try:
        for manager in managers:
            png = rank_display.as_png(manager.canvas.figure)
            if png is not None:
                rank_display.publish({"image/png": png, "text/plain": repr(manager.canvas.figure)}, {})
    finally:
        _pylab_helpers.Gcf.destroy_all()
