// The messages between the panel and the kernel.
// Generated from nblaunch/notebook/page_messages.py by `python -m tests.unit.page_types`.

/** The state of one rank.
 * @typedef {[rank: number, state: "starting" | "running" | "waiting" | "stopping" | "returned" | "failed" | "ended"]} RankEntry */
/** One progress bar of a rank. The steps after `first` took `seconds`; a bar within another has a higher level.
 * @typedef {[rank: number, name: string, done: number | null, total: number | null, seconds: number | null, first: number, level: number]} ProgressEntry */
/** One point of a metric, with the number of the report in its rank; y is null if it is not finite.
 * @typedef {[metric: string, rank: number, x: number, y: number | null, number: number]} PointEntry */
/** A metric in a chart, and the data that it is of. Numbered: its x are the numbers of the reports.
 * @typedef {[metric: string, part: "training" | "epoch" | "valid" | "test", numbered: boolean]} ChartLine */
/** What is drawn in one chart: metrics, training first, with the better direction and how to write their values.
 * @typedef {[lines: ChartLine[], direction: "up" | "down" | "", kind: "" | "rate" | "lr"]} ChartEntry */
/** The point that a rank has marked as the best one of a metric; y is null if it is not known.
 * @typedef {[metric: string, x: number, y: number | null]} BestEntry */
/** What a rank uses of something: a share (1 is one whole core or GPU), or bytes.
 * @typedef {[label: string, value: number, unit: "share" | "bytes"]} UsageValue */
/** What a rank uses.
 * @typedef {[rank: number, values: UsageValue[]]} ResourceEntry */
/** A message of nblaunch, and its time in seconds since the launch began.
 * @typedef {[time: number, text: string]} NoteEntry */
/** The stack of one rank.
 * @typedef {[rank: number, text: string]} StackEntry */
/** The numbers of the outputs that a rank shows, in order, and how many are left out.
 * @typedef {[rank: number, numbers: number[], left_out: number]} OutputsEntry */
/** Bytes of one output's JSON, in the message's buffer, one part after the other; total is the size of the whole.
 * @typedef {[number: number, offset: number, size: number, total: number]} OutputPart */
/** The number of the line after those that the page has of one log.
 * @typedef {[attempt: number, rank: number, stream: "out" | "err", end: number]} LogEnd */
/** A line as a terminal would show it, with its own colours; its time in seconds since the launch began.
 * @typedef {[time: number, text: string]} LineEntry */
/** The state of the launch.
 * @typedef {object} StateEntry
 * @property {"starting" | "running" | "stopping" | "finished" | "failed" | "stopped"} name
 * @property {string} countdown
 * @property {number} attempt
 * @property {string} log_dir
 * @property {number | null} seconds
 * @property {string} message */
/** The root cause of a failed launch; rank is -1 if no rank failed.
 * @typedef {object} FailureEntry
 * @property {number} rank
 * @property {string} headline
 * @property {string} details
 * @property {string} where
 * @property {string} source
 * @property {string} traceback
 * @property {string[]} others */
/** The stacks of all live ranks, and their time in seconds since the launch began.
 * @typedef {object} StacksEntry
 * @property {number} time
 * @property {StackEntry[]} ranks */
/** The last profile, as safe HTML, its time in seconds since the launch began, and whether there is a trace.
 * @typedef {object} ProfileEntry
 * @property {number} time
 * @property {string} html
 * @property {boolean} has_trace */
/** Why ranks wait in a collective, and the ranks to debug; no lines: they have gone on.
 * @typedef {object} StuckEntry
 * @property {string[]} lines
 * @property {number[]} ranks */
/** One output: safe HTML, the source of an image, or text; with the text that stands for it.
 * @typedef {object} OutputContent
 * @property {"html" | "image" | "text"} kind
 * @property {string} body
 * @property {string} text
 * @property {number | null} width
 * @property {number | null} height */
/** Lines of one log: they replace what the page has from number `first` on, and the unfinished lines.
 * @typedef {object} LogPart
 * @property {number} attempt
 * @property {number} rank
 * @property {"out" | "err"} stream
 * @property {number} first
 * @property {LineEntry[]} lines
 * @property {string[]} open */
/** The widget's `info`: what does not change during the launch.
 * @typedef {object} PanelInfo
 * @property {string} launch
 * @property {string} name
 * @property {number} world_size
 * @property {string} ranks
 * @property {string} device
 * @property {boolean} blocking
 * @property {boolean} is_session
 * @property {string[]} hosts
 * @property {string} cell
 * @property {string} run */
/** The parts of a panel that have changed; an absent part has not.
 * @typedef {object} Changes
 * @property {StateEntry} [state]
 * @property {RankEntry[]} [ranks]
 * @property {ProgressEntry[]} [progress]
 * @property {PointEntry[]} [metrics]
 * @property {ChartEntry[]} [charts]
 * @property {BestEntry[]} [best]
 * @property {ResourceEntry[]} [resources]
 * @property {OutputsEntry[]} [outputs]
 * @property {NoteEntry[]} [notes]
 * @property {FailureEntry} [failure]
 * @property {StacksEntry} [stacks]
 * @property {ProfileEntry} [profile]
 * @property {StuckEntry} [stuck] */
/** What has changed. Without content it is a heartbeat; last if the launch has ended, and nothing else follows.
 * @typedef {object} Delta
 * @property {"delta"} kind
 * @property {number} seq
 * @property {number} now
 * @property {Changes} [changes]
 * @property {LogPart[]} [logs]
 * @property {OutputPart[]} [outputs]
 * @property {boolean} [last] */
/** Everything but the logs, in answer to these requests. What the pages lack of the last lines follows.
 * @typedef {object} Snapshot
 * @property {"snapshot"} kind
 * @property {number} seq
 * @property {number} now
 * @property {Changes} changes
 * @property {number[]} requests */
/** A click has arrived; done if the launch had already ended.
 * @typedef {object} Acknowledged
 * @property {"acknowledged"} kind
 * @property {"stop" | "kill" | "profile" | "done"} action
 * @property {string} launch */
/** The record as it is now: what the notebook's output holds.
 * @typedef {object} RecordText
 * @property {"record"} kind
 * @property {string} html
 * @property {string} text */
/** The trace of the last profile, in the message's buffer; empty: it is gone.
 * @typedef {object} TraceFile
 * @property {"trace"} kind
 * @property {string} name */
/** A click; "record": for the notebook; "look": at a debugger; "seen": a page shows the panel, or its end.
 * @typedef {object} Request
 * @property {"stop" | "kill" | "stacks" | "profile" | "trace" | "record" | "look" | "seen"} kind
 * @property {string} launch
 * @property {number} [rank] */
/** The page may have missed messages: it asks for a snapshot, and for the logs from these ends.
 * @typedef {object} Resync
 * @property {"resync"} kind
 * @property {number} request
 * @property {LogEnd[]} logs */
/** @typedef {Delta | Snapshot | Acknowledged | RecordText | TraceFile} ToPage */
/** @typedef {Request | Resync} FromPage */

export {};
