// Reads [[changes, ...], ...] from standard input, each list what one page receives; writes what its charts draw.
import { MetricBook } from "../../../nblaunch/notebook/static/series.js";

const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);

function tablesOf(messages) {
  let book = new MetricBook();
  for (const { whole, charts, metrics } of messages) {
    if (whole) book = new MetricBook();
    if (charts) book.arrange(charts);
    if (metrics) book.add(metrics);
    for (const group of book.groups()) group.table();
  }
  return Object.fromEntries(book.groups().map((group) => [group.name, group.table()]));
}
process.stdout.write(JSON.stringify(JSON.parse(Buffer.concat(chunks).toString()).map(tablesOf)));
