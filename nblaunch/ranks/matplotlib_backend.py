"""A matplotlib backend for ranks: ``plt.show()`` saves each figure beside the rank's log and prints its path.

Ranks inherit the notebook's ``MPLBACKEND``, and its inline backend needs IPython.
"""

from __future__ import annotations

from typing import Any

from matplotlib import _pylab_helpers
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from nblaunch.ranks.notebook_stand_ins import save_figure


class FigureManager(FigureManagerBase):
    """Saves figures instead of showing them."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        """Save all open figures, and close them."""
        for manager in _pylab_helpers.Gcf.get_all_fig_managers():
            save_figure(manager.canvas.figure)
        _pylab_helpers.Gcf.destroy_all()


class FigureCanvas(FigureCanvasAgg):
    """What matplotlib looks for in a backend's module."""

    manager_class: Any = FigureManager
