// Reads [[base64, ...], ...] from standard input, each list one stream in pieces; writes the lines of each stream.
import { LineAssembler } from "../../../nblaunch/notebook/static/lines.js";

const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const streams = JSON.parse(Buffer.concat(chunks).toString());

function linesOf(pieces) {
  const assembler = new LineAssembler();
  const lines = [];
  const take = ({ lines: more, retract }) => {
    lines.splice(lines.length - retract, retract);
    lines.push(...more.map((line) => line.text));
  };
  for (const piece of pieces) take(assembler.feed(new Uint8Array(Buffer.from(piece, "base64"))));
  take(assembler.finish());
  return lines;
}
process.stdout.write(JSON.stringify(streams.map(linesOf)));
