"""The looks of the page, in light and dark, on a wide screen and on a phone. The colours are the report's.

On a narrow screen a row of a table becomes a card, and every cell says the name of its column; the ``role`` of each
element keeps it a table for those who listen to it.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1f2328; --soft: #5d6570; --rule: #e3e1dc; --accent: #1f6f78;
  --good: #2f7a48; --bad: #b0433f; --bar: #2f6fb0; --alert: #fbeeec;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15181c; --card: #1d2126; --ink: #e8e6e1; --soft: #a2a8b0; --rule: #343a42; --accent: #6fc3cc;
    --good: #7cc48b; --bad: #ef9a94; --bar: #6aa5de; --alert: #33211f;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 1120px; margin: 0 auto; padding: 32px 24px 48px; }
bdi, h1, p { overflow-wrap: anywhere; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h1 small { color: var(--soft); font-size: inherit; font-weight: 400; }
h2 { font-size: 19px; margin: 0 0 6px; }
p { margin: 0; color: var(--soft); }
header { margin: 0 0 20px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
section { padding: 18px 24px 20px; margin: 0 0 18px; }
footer { color: var(--soft); font-size: 14px; }
#pulse { float: right; margin: 6px 0 0 16px; color: var(--soft); font-size: 14px; }
#pulse::before { content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 50%; }
#pulse::before { background: var(--soft); margin-right: 7px; }
#pulse[data-state=live]::before { background: var(--good); }
#pulse[data-state=lost] { color: var(--bad); }
#pulse[data-state=lost]::before { background: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(120px, 1fr)); gap: 16px 14px; margin: 0; }
.tiles div { border-left: 3px solid var(--accent); padding-left: 12px; }
.tiles dt { color: var(--soft); font-size: 14px; }
.tiles dd { margin: 0; font-size: 25px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tiles .worrying { border-color: var(--bad); }
.alert { background: var(--alert); border-color: var(--bad); }
.alert p { color: var(--ink); }
.alert h2, .bad { color: var(--bad); }
.good { color: var(--good); }
table { border-collapse: collapse; width: 100%; font-size: 15px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 0 7px 18px; text-align: right; border-bottom: 1px solid var(--rule); font-weight: 400; }
thead th { color: var(--soft); vertical-align: bottom; line-height: 1.3; }
th:first-child { text-align: left; padding-left: 0; }
tbody th { font-weight: 500; }
tbody tr:last-child > * { border-bottom: 0; }
#experts td:last-child, #experts thead th:last-child { text-align: left; padding-left: 30px; }
.bars { display: inline-block; vertical-align: middle; font: 9.5px system-ui, sans-serif; }
.bars text { text-anchor: middle; fill: var(--soft); }
.bar { fill: var(--bar); }
.base { fill: var(--rule); }
code { font: 0.93em ui-monospace, monospace; }
@media (max-width: 720px) {
  body { padding: 18px 12px 32px; }
  section { padding: 14px 16px; }
  h1 { font-size: 22px; }
  #pulse { float: none; margin: 0 0 10px; }
  .tiles { grid-template-columns: 1fr 1fr; }
  table, tbody, th, td { display: block; }
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  tr { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); column-gap: 26px; }
  tr { padding: 10px 0; border-bottom: 1px solid var(--rule); }
  tbody tr:last-child { border-bottom: 0; padding-bottom: 0; }
  th, td, tbody tr:last-child > * { border: 0; padding: 2px 0; text-align: left; }
  tbody th { font-size: 17px; }
  tbody th, #experts td:last-child, td:nth-child(2):last-child, #audit td { grid-column: 1 / -1; }
  #experts td:last-child { padding: 4px 0 0; align-items: end; }
  td { display: flex; justify-content: space-between; gap: 16px; }
  td::before { content: attr(data-column); color: var(--soft); flex: none; }
}
"""
