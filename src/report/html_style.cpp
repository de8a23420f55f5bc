// The style of the page: two colour schemes, and a layout that adapts to narrow screens.
#include "report/html.h"

namespace tenon::page {

const std::string_view kStyle = R"css(
:root{color-scheme:light dark;--ground:#faf9f6;--surface:#fff;--ink:#1f2429;--soft:#5b636c;
--line:#e3e0d9;--edge:#858b92;--accent:#12656a;--track:#ebe8e1;
--mul:#e7ebfa;--mult:#2f4493;--map:#e0f0ec;--mapt:#14594e;--norm:#efe8f8;--normt:#5b3a93;
--move:#edebe5;--movet:#55524a;--kept:#fcf3de;--keptline:#b58a28;--keptt:#6b4a06;
--saved:#b87d12;--grad:#8a5bb5;--work:#868d94;--out:#12656a;--param:#4a62bd;--state:#4e9a86;
--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
--sans:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans",sans-serif}
@media(prefers-color-scheme:dark){:root{--ground:#15181b;--surface:#1c2024;--ink:#e4e6e8;
--soft:#a0a8b0;--line:#2d3238;--edge:#6d757d;--accent:#6cc4bd;--track:#2a2f35;
--mul:#262f50;--mult:#b9c6fb;--map:#19352f;--mapt:#9fdccd;--norm:#322746;--normt:#d6c1f5;
--move:#2b2d2f;--movet:#c3c5c2;--kept:#332a17;--keptline:#7d6530;--keptt:#f0d69a;
--saved:#d9a441;--grad:#b58ae0;--work:#767e86;--out:#6cc4bd;--param:#8ea3f0;--state:#62b39d}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.55 var(--sans)}
main{max-width:1044px;margin:0 auto;padding:36px 24px 48px}
h1{font:600 21px/1.45 var(--mono);margin:0 0 18px;overflow-wrap:anywhere;letter-spacing:-.01em}
h2{font-size:19px;line-height:1.3;margin:0 0 4px;letter-spacing:-.01em}
section{margin-top:52px}
code,pre{font-family:var(--mono);font-size:12.5px}
.mark{display:flex;align-items:center;gap:9px;margin:0 0 14px;color:var(--accent);font-weight:600}
.mark .m1{fill:var(--accent)}.mark .m2{fill:var(--saved)}
.note{color:var(--soft);margin:0 0 16px;max-width:70ch}.soft{color:var(--soft)}
.facts{display:flex;flex-wrap:wrap;gap:6px 26px;margin:0 0 22px}
.facts div{display:flex;gap:7px}.facts dt{color:var(--soft)}.facts dd{margin:0}
.lead{font-size:18px;line-height:1.5;margin:0 0 20px;max-width:62ch}
.tiles{list-style:none;margin:0;padding:0;display:grid;gap:12px;
grid-template-columns:repeat(auto-fit,minmax(142px,1fr))}
.tiles li{background:var(--surface);border:1px solid var(--line);border-radius:10px;min-width:0;
padding:11px 13px;display:flex;flex-direction:column}
.tiles .name{color:var(--soft);font-size:13px}
.tiles .value{font-size:20px;font-weight:600;line-height:1.4;white-space:nowrap;font-variant-numeric:tabular-nums}
.tiles .below{color:var(--soft);font-size:13px}
.chain{list-style:none;margin:0;padding:0;display:flex;flex-wrap:wrap;row-gap:10px}
.chain li{position:relative;display:flex;flex-direction:column;padding:8px 13px;border-radius:8px;
margin-right:30px;min-width:0}
.chain li:not(:last-child)::before{content:"";position:absolute;right:-23px;top:50%;width:16px;
height:1.5px;background:var(--edge)}
.chain li:not(:last-child)::after{content:"";position:absolute;right:-24px;top:calc(50% - 3.3px);
border:4px solid transparent;border-left:7px solid var(--edge);border-right:0}
.chain .what{font:500 13.5px/1.4 var(--mono);overflow-wrap:anywhere}
.chain .cost{font-size:12.5px}
.op{border-radius:6px}.op.mul{background:var(--mul);color:var(--mult)}
.op.map{background:var(--map);color:var(--mapt)}.op.norm{background:var(--norm);color:var(--normt)}
.op.move{background:var(--move);color:var(--movet)}
.legend{display:flex;flex-wrap:wrap;gap:4px 20px;margin:-6px 0 18px;color:var(--soft);font-size:13px}
.legend span{display:inline-flex;align-items:center;gap:7px}
.dot{fill:var(--work)}.dot.saved{fill:var(--saved)}.dot.grad{fill:var(--grad)}
.dot.output,.dot.extra_out{fill:var(--out)}.dot.state{fill:var(--state)}
.flow{display:block;width:100%;height:auto}.flow.narrow{display:none}
.single .flow.narrow{display:block;max-width:356px}
.flow text{font-family:var(--sans);font-size:12.5px;fill:var(--ink)}
.flow .card{fill:var(--surface);stroke:var(--line)}.flow .pill{fill:none;stroke:var(--edge)}
.flow .tag{font-weight:600;font-size:14px;fill:var(--accent)}.flow .soft{fill:var(--soft)}
.flow .column{fill:var(--soft);font-size:13px}.flow .small{font-size:11.5px}
.flow .line{font-family:var(--mono);font-size:11.5px}.flow .end{text-anchor:end}
.flow .mid{text-anchor:middle}.flow .chipt{font-family:var(--mono);font-size:12px;text-anchor:middle}
.flow .chip.mul{fill:var(--mul)}.flow .chip.map{fill:var(--map)}.flow .chip.norm{fill:var(--norm)}
.flow .chip.move{fill:var(--move)}.flow .chipt.mul{fill:var(--mult)}
.flow .chipt.map{fill:var(--mapt)}.flow .chipt.norm{fill:var(--normt)}
.flow .chipt.move{fill:var(--movet)}.flow .track{fill:var(--track)}.flow .fill{fill:var(--accent)}
.flow .edge{fill:none;stroke:var(--edge);stroke-width:1.4}.flow .head{fill:var(--edge)}
.flow .away{stroke-dasharray:3 4}.flow .ground{fill:var(--ground)}
.flow .kept{fill:var(--kept);stroke:var(--keptline)}.flow .callers{stroke-dasharray:4 3}
.flow .keptt{fill:var(--keptt)}.flow .keep{fill:none;stroke:var(--keptline);stroke-width:1.4}
.flow .keephead{fill:var(--keptline)}
table{border-collapse:collapse;width:100%;font-size:14px}
caption{text-align:left;color:var(--soft);padding:14px 0 6px;font-size:14px}
th{font-weight:600;text-align:left}td,th{padding:10px 14px 4px 0;vertical-align:top}
thead th{font-weight:400;color:var(--soft);font-size:13px;padding:6px 14px 6px 0;
border-bottom:1px solid var(--line)}
.passes{margin-top:10px;table-layout:fixed}.c-pass{width:46px}.c-stores{width:28%}
.c-bytes,.c-products{width:15.5%}.c-floor{width:84px}.c-maker{width:84px}
.passes tbody+tbody tr:first-child>*{border-top:1px solid var(--line)}
.passes tbody th{color:var(--accent);width:44px}.passes .op{padding:2px 8px;font:12.5px/1.7 var(--mono);
white-space:nowrap;display:inline-block;margin:0 3px 4px 0}
.passes ul{list-style:none;margin:0;padding:0}
.passes .ops .soft{font-size:13px}.passes .stores .soft{white-space:nowrap}
.n{font-variant-numeric:tabular-nums}.amount{white-space:nowrap;display:flex;justify-content:space-between;gap:10px}
.meter{display:block;height:4px;border-radius:2px;background:var(--track);margin-top:5px}
.meter span{display:block;height:100%;min-width:2px;border-radius:2px;background:var(--accent)}
.more td{padding-top:0;padding-bottom:12px}.why{margin:2px 0 4px;color:var(--soft);max-width:86ch;
font-size:13.5px}.why b{color:var(--keptt);font-weight:600;margin-right:4px}
summary{cursor:pointer;color:var(--soft);font-size:13.5px}summary:hover{color:var(--ink)}
summary:focus-visible,pre:focus-visible{outline:2px solid var(--accent);outline-offset:2px;
border-radius:3px}
details p{margin:8px 0 0;font-size:13.5px;color:var(--soft)}
pre{margin:8px 0 4px;padding:12px 14px;background:var(--surface);border:1px solid var(--line);
border-radius:8px;overflow-x:auto;line-height:1.6}
.stack{display:flex;gap:2px;height:12px;border-radius:6px;overflow:hidden;margin-bottom:14px}
.stack span{min-width:2px}.saved{background:var(--saved)}.workspace{background:var(--work)}
.param{background:var(--param)}.state{background:var(--state)}.grad{background:var(--grad)}
.output{background:var(--out)}.dot{background:none}
.bill details{border-top:1px solid var(--line)}.bill details:last-child{border-bottom:1px solid var(--line)}
.bill summary{display:grid;grid-template-columns:12px 1fr 92px 64px;gap:12px;align-items:center;
padding:9px 0;color:var(--ink);font-size:14.5px;list-style:none}
.bill summary::-webkit-details-marker{display:none}.bill summary .n{text-align:right}
.swatch{width:10px;height:10px;border-radius:3px}.bill details p{margin:0 0 4px 24px}
.buffers{margin:0 0 12px 24px;width:calc(100% - 24px);font-size:13.5px}
.buffers td,.buffers th{padding:3px 14px 3px 0}.buffers .n{text-align:right;padding-right:76px}
.buffers code{overflow-wrap:anywhere}
footer{margin-top:52px;color:var(--soft);font-size:13px}
@media(max-width:820px){main{padding:24px 16px 36px}section{margin-top:40px}
.flow.wide{display:none}.flow.narrow{display:block;max-width:430px;margin:0 auto}
h1{font-size:17px}.tiles .value{font-size:19px}.lead{font-size:16.5px}
.passes thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.passes,.passes tbody,.passes tr,.passes th,.passes td{display:block;width:auto;padding:0}
.passes caption{display:block;padding:14px 0 6px}
.passes tbody{background:var(--surface);border:1px solid var(--line);border-radius:10px;
padding:12px 14px;margin-bottom:12px}.passes tbody+tbody tr:first-child>*{border:0}
.passes tbody td[data-label]{display:grid;grid-template-columns:76px minmax(0,1fr);padding:3px 0}
.passes td[data-label]::before{content:attr(data-label);color:var(--soft);font-size:13px;grid-row:1/9}
.passes td[data-label]>*{grid-column:2}.passes .ops{max-width:none}
.passes tbody td.ops{display:block}.passes td.ops::before{content:none}
.more td:first-child{display:none}.more td{padding:4px 0 0}
.buffers{margin-left:0;width:100%}.buffers .n{padding-right:0}.bill details p{margin-left:0}
.bill summary{grid-template-columns:12px 1fr auto 58px}}
@media print{body{background:none}.passes tbody,.tiles li{break-inside:avoid}}
)css";

}  // namespace tenon::page
