"""The style sheet of report.html: cards and a table, for a phone or a desk, light or dark."""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff;
  --text: #1c2330; --muted: #647084; --grid: #e3e7ee; --good: #12805c; --bad: #c0392b;
  --busy: #1f6feb;
  --series-0: #2563eb; --series-1: #d9480f; --series-2: #12805c; --series-3: #9333ea;
  --series-4: #b7791f; --series-5: #be185d; }
@media (prefers-color-scheme: dark) { :root { --page: #0f141b; --card: #18202b; --text: #e2e8f0;
  --muted: #94a0b3; --grid: #2b3645; --good: #3fb98a; --bad: #f0766a; --busy: #6ea8fe;
  --series-0: #6ea8fe; --series-1: #ff9b5e; --series-2: #4cc79a; --series-3: #c79bff;
  --series-4: #e6b75c; --series-5: #f583b6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.5rem; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 28px 0 8px; }
h3 { font-size: .95rem; margin: 0 auto 0 0; overflow-wrap: anywhere; }
p { margin: 4px 0; }
.muted, small, footer { color: var(--muted); font-size: .85rem; }
.status { font-weight: 600; }
.running { color: var(--busy); } .finished { color: var(--good); } .failed { color: var(--bad); }
progress { width: 100%; height: 8px; accent-color: var(--busy); }
.failure { margin-top: 8px; padding: 10px 14px; border-left: 4px solid var(--bad);
  background: var(--card); border-radius: 6px; overflow-wrap: anywhere; }
.tiles { display: grid; gap: 10px; margin: 14px 0;
  grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); }
.tiles div, figure, .scroll, pre, details { background: var(--card); border-radius: 10px;
  border: 1px solid var(--grid); }
.tiles div { padding: 10px 14px; }
.tiles span { display: block; color: var(--muted); font-size: .8rem; }
.tiles b { font-size: 1.2rem; }
.plots { display: grid; gap: 14px; margin-top: 20px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; padding: 12px 12px 4px; min-width: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 14px; align-items: baseline; }
.key { font-size: .82rem; color: var(--muted); } .key b { color: var(--text); }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }
.warning { color: var(--bad); font-size: .82rem; }
svg { display: block; width: 100%; height: auto; stroke-linejoin: round; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px; text-align: left; border-bottom: 1px solid var(--grid);
  font-size: .88rem; vertical-align: top; }
tbody th { font-weight: 500; } tr:last-child > * { border-bottom: 0; }
.figures th + th, .figures td { text-align: right; white-space: nowrap; }
thead th { color: var(--muted); font-weight: 500; }
.best { color: var(--good); }
details { margin-top: 14px; padding: 8px 14px; } details .scroll, details pre { border: 0; }
summary { cursor: pointer; font-weight: 600; }
td { overflow-wrap: anywhere; }
pre { padding: 12px 14px; margin: 0; overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .82rem; }
footer { margin-top: 24px; } a { color: var(--busy); }
"""
