// The page of `irc show --html`. What is shown is in the address after "#"; data.py describes the data.
"use strict";
const at = id => document.getElementById(id);
const D = JSON.parse(at("data").textContent), S = D.strings, LAST = D.passes.length - 1;
// ---- elements, into which data only comes as text and attributes; numbers as text
const maker = namespace => (tag, attributes, ...inner) => {
  const node = document.createElementNS(namespace, tag);
  for (const [key, value] of Object.entries(attributes))
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(key, value);
  node.append(...inner.flat(9));
  return node;
};
const el = maker("http://www.w3.org/1999/xhtml"), svg = maker("http://www.w3.org/2000/svg");
const div = (kind, ...inner) => el("div", { class: kind }, inner);
const span = (kind, ...inner) => el("span", { class: kind }, inner);
const cell = (width, inner, kind = "cell") => el("span", { class: kind, style: `width: ${width}em` }, inner);
const a = (change, ...inner) => el("a", { href: href(change) }, inner);
const facts = rows => el("table", {}, rows.filter(row => String(row[1])).map(([name, ...inner]) =>
  el("tr", {}, el("th", {}, name), el("td", {}, inner))));
const section = (title, ...inner) => inner.flat(9).length ? [el("h2", {}, title), inner] : [];
const put = (s, n) => n < 0 ? S[s] : S[s].replaceAll(D.mark, n);
const inside = (scope, outer) => !outer || scope === outer || scope.startsWith(outer + ".");
const parent = path => path.slice(0, Math.max(0, path.lastIndexOf(".")));
const plain = scope => scope.replace(/#\d+$/, "");  // without the number of a part of a long scope
const cut = (text, most) => text.length <= most ? text : text.slice(0, Math.max(0, most - 1)) + "…";
const digits = n => n >= 100 ? Math.round(n).toLocaleString("en") : String(+n.toPrecision(3));
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const signed = n => n > 0 ? `+${n}` : n < 0 ? `−${-n}` : "=";
const time = us => us < 0 ? "" : us < 1000 ? `${digits(us)} µs` : `${digits(us / 1000)} ms`;
const bytes = (n, units = ["B", "kB", "MB", "GB", "TB"]) => n < 0 ? "" : n < 1000 || !units[1]
  ? `${digits(n)} ${units[0]}` : bytes(n / 1000, units.slice(1));
const HUES = { tp: 0, pp: 1, dp: 2, ep: 3, cp: 4 };
D.mesh.forEach(([axis], k) => { HUES[axis] ??= (k + 3) % 6; });
const hue = axis => axis && `--hue: var(--a${HUES[axis] ?? 5})`;
const painted = text => text.split(/(\{sum [^}]*\}|(?<=[@.])[a-z]\w*)/).map((part, k) => k % 2 === 0 ? part
  : part[0] === "{" ? el("span", { class: "partial", style: hue(part.slice(5, -1)) }, part)
    : el("span", { class: "axis", style: hue(part) }, part));  // a type: axes and partial sums in their hue
// ---- the functions of a state, unfolded when they are shown
const views = new Map();
function viewOf(pass, wanted) {
  const state = D.states[D.passes[pass].state], all = state.functions;
  const k = Math.max(0, all.findIndex(f => f.name === wanted)), before = k && viewOf(pass, all[k - 1].name);
  if (!views.has(all[k])) views.set(all[k], unfolded(all[k], state, k && before.start + before.names.length));
  return views.get(all[k]);
}
function unfolded(f, state, start) {  // start: the number of its first value among all of the state
  const v = { f, state, start, names: [], values: [], ops: [], units: new Map() }, counts = new Map();
  const add = (hint, type, op) => {
    const n = counts.get(hint) ?? 0;
    counts.set(hint, n + 1);
    v.names.push("%" + (hint && n ? `${hint}.${n}` : hint || n));
    v.values.push({ type: D.types[type], op, users: [] });
  };
  for (const [hint, type] of D.signatures[f.signature][0]) add(S[hint], type);
  for (const [block, prefix, n, inputs, over] of f.runs) {
    const other = new Map(), { rows, us, bytes, comm } = D.blocks[block];
    for (let k = 0; k < over.length; k += 3) other.set(`${over[k]}:${over[k + 1]}`, over[k + 2]);
    const path = n >= 0 ? `${S[prefix]}.${n}` : S[D.rows[rows[0]][1]].split(".").slice(0, 2).join(".");
    const unit = v.units.get(path) ?? { path, n, ops: [], graphs: {}, first: -1, last: -1 };
    v.units.set(path, unit);
    rows.forEach((row, k) => {
      const [op, scope, file, line, results, operands, present, attributes] = D.rows[row];
      const first = v.names.length, types = results.filter((_, j) => j % 2).map(type => D.types[type]);
      const ins = operands.map((o, j) => o < 0 ? inputs[-1 - o] : typeof o === "number" ? first - o
        : "@" + put(other.get(`${k}:${-1 - j}`) ?? o[0], n));
      const made = { op: S[op], scope: put(scope, n), unit: path, first, types, ins, file: S[file], line,
        where: file < 0 ? "" : `${S[file]}:${line}`, us: us[k], bytes: bytes[k], comm: comm[k],
        present: present.map(s => S[s] + "="), attributes: S[attributes], isLast: state === D.states.at(-1) };
      for (let j = 0; j < results.length; j += 2)
        add(put(other.get(`${k}:${j / 2}`) ?? results[j], n), results[j + 1], made);
      for (const o of ins) v.values[o]?.users.push(made);
      made.names = v.names.slice(first).join(", ");
      made.key = made.names ? v.names[first] : `#${v.ops.length}`;
      for (const ops of [unit.ops, v.ops]) ops.push(made);
    });
  }
  for (const [prefix, first, last, unit] of f.layers)
    for (let n = first; n <= last; n++)
      Object.assign(v.units.get(n < 0 ? S[prefix] : `${S[prefix]}.${n}`) ?? {},
        { graphs: D.units[unit].graphs, first, last });
  v.scopes = scopesOf(v);
  return v;
}
function scopesOf(v) {  // path → scope
  const scopes = new Map([["", { path: "", label: v.f.name, level: 1, count: 0, children: [] }]]);
  for (const { scope } of v.ops)
    for (let words = scope ? scope.split(".") : [], k = 0; k <= words.length; k++) {
      const path = words.slice(0, k).join("."), label = words[k - 1];
      const found = scopes.get(path) ?? { path, label, level: k + 1, count: 0, children: [] };
      if (!scopes.has(path)) scopes.get(parent(path)).children.push(found);
      scopes.set(path, found);
      found.count++;
    }
  return scopes;
}
const opOf = key => key.startsWith("#") ? v.ops[key.slice(1)] : v.values[v.names.indexOf(key)]?.op;
const opsIn = scope => v.ops.filter(op => inside(op.scope, plain(scope)));
const sumIn = (scope, key) => opsIn(scope)
  .reduce((sum, op) => Math.min(sum, op[key]) < 0 ? -1 : sum + op[key], 0);  // -1: not known
const axisOf = ([, sharded, partial] = ["", [], []]) => partial[0] ?? sharded[0];
const link = (v, value) => a(changeTo(v, value), v.names[value]);
function lineOf(v, op) {  // the text of an operation, with links to what it reads
  const shift = op.ins.length - op.present.length;
  const ins = op.ins.map((o, j) => [j ? ", " : " ", op.present[j - shift] ?? "", o >= 0 ? link(v, o) : o]);
  const types = op.types.map(([text], j) => [j ? ", " : " : ", painted(text)]);
  return [el("b", {}, op.names), op.names && " = ", op.op, ins, op.attributes && " " + op.attributes, types];
}
// ---- where a value comes from; here values are numbered over all functions of a state
const others = D.passes.map(pass => new Map(pass.origins[1].map(([value, ...origin]) => [value, origin])));
function originOf(pass, value) {  // [how, hit or -1, values before the pass]
  const run = D.passes[pass].origins[0].find(([to, , n]) => value >= to && value < to + n);
  const [how, hit, old] = others[pass].get(value) ?? [run?.[3], -1, run ? [run[1] + value - run[0]] : []];
  return [S[how], hit, old];
}
function originsOf(pass, value) {  // the passes that made or changed a value, last first
  const found = [];
  for (let p = pass; p > 0 && value !== undefined; p--) {
    const [how, hit, old] = originOf(p, value);
    if (how && how !== "kept") found.push({ pass: p, how, hit, old: old.map(o => nameAt(p - 1, o)) });
    value = old[0];
  }
  return found;
}
const nameAt = (pass, value) => D.states[D.passes[pass].state].functions.map(f => viewOf(pass, f.name))
  .flatMap(view => view.names[value - view.start] ?? [])[0];
function hitOf(pass, n) {  // of a rewrite: its rule, the rule's line, the place, the text before
  const [hit, layer] = D.passes[pass].hits[n - D.passes[pass].first] ?? [];
  return D.hits[hit]?.map(s => put(s, layer)) ?? ["", "", "", ""];
}
// ---- what is shown
const start = viewOf(LAST, D.stages[0]?.function), most = (p, q) => q.ops.length - p.ops.length;
const DEFAULTS = { pass: LAST, with: -1, fn: start.f.name, op: "", tab: "graph", over: "", stage: 0,
  pane: "view", scope: [...start.units.values()].filter(unit => unit.n >= 0).sort(most)[0]?.path ?? "" };
let now = DEFAULTS, v = start, drawn = null;
function readState() {
  const state = { ...DEFAULTS };
  for (const [key, value] of new URLSearchParams(location.hash.slice(1)))
    if (Object.hasOwn(DEFAULTS, key)) state[key] = typeof DEFAULTS[key] === "string" ? value : +value;
  for (const key of ["pass", "with"]) if (!D.passes[state[key]]) state[key] = DEFAULTS[key];
  if (!Object.hasOwn(DRAW, state.tab)) state.tab = "graph";
  return state;
}
const href = change => "#" + new URLSearchParams(
  Object.entries({ ...now, ...change }).filter(([key, value]) => value !== DEFAULTS[key]));
function go(change) {
  location.hash = href(change);
  show();
}
const scopeFor = op => op && !inside(op.scope, plain(now.scope)) ? { scope: op.unit } : {};
const changeTo = (v, value) => ({ op: v.names[value], fn: v.f.name, ...scopeFor(v.values[value].op) });
const changeToOp = op => ({ op: op.key, ...scopeFor(op) });
const before = () => now.with >= 0 ? now.with : Math.max(0, now.pass - 1);
function redraw(box, children, isSame = true) {  // keeps focus, and the scroll position of the same content
  const key = box.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const scrolled = () => [box, box.querySelector(".list")].filter(Boolean);
  const places = scrolled().map(e => [e.scrollLeft, e.scrollTop]);
  box.replaceChildren(...[children].flat(9));
  scrolled().forEach((e, k) => e.scrollTo(...(isSame && places[k] || [0, 0])));
  if (key !== undefined) [...box.querySelectorAll("[data-key]")].find(e => e.dataset.key === key)?.focus();
}
function show() {
  const old = drawn === null ? {} : now, changed = (...keys) => keys.some(key => old[key] !== now[key]);
  now = readState();
  v = viewOf(now.pass, now.fn);
  drawn = location.hash;
  for (let path = now.scope; path && changed("scope"); path = parent(path)) isUnfolded.add(path);
  drawPasses();
  drawTree();
  const choices = (key, names) => redraw(at(key), names.map(name => el("a", { href: href({ [key]: name }),
    "data-key": name, "aria-current": name === now[key] && "page" }, name)));
  choices("tab", Object.keys(DRAW));
  choices("pane", ["scopes", "view", "details"]);  // on narrow screens one of them is seen
  document.body.dataset.pane = now.pane;
  redraw(at("bar"), barOf());
  const isSame = !changed("pass", "with", "fn", "scope", "tab", "stage");
  redraw(at("view"), DRAW[now.tab](D.stages[now.stage] ?? D.stages[0]), isSame);
  const list = at("view").querySelector(".list"), chosen = at("view").querySelector(".chosen");
  list?.fill();
  if (changed("op", "tab", "scope", "pass")) (list ?? chosen)?.scrollIntoView({ block: "nearest" });
  if (changed("op", "scope", "pass", "fn")) redraw(at("side"), sideOf(), false);
}
// ---- the strip of passes and the tree of scopes
function drawPasses() {
  const most = Math.max(1, ...D.passes.map(pass => pass.after));
  redraw(at("passes"), D.passes.map((pass, k) => el("a", {
    href: href({ pass: k }), class: k === now.with && "with", "aria-current": k === now.pass && "step",
    title: `${pass.text}\nbar: operations after it; shift-click: compare with it`,
    "data-key": k, onclick: event => {
      if (event.shiftKey) go({ with: k === now.with ? -1 : k, tab: "diff" }, event.preventDefault());
    },
  }, pass.name, el("small", {}, plural(pass.after, "op"), k ? " " + signed(pass.after - pass.before) : ""),
  el("small", {}, time(pass.seconds * 1e6), pass.hits.length ? ` · ${plural(pass.hits.length, "rewrite")}` : ""),
  el("i", { style: `width: ${100 * pass.after / most}%` }))));
  at("passes").children[now.pass].scrollIntoView({ block: "nearest", inline: "nearest" });
  at("with").replaceChildren(...["the pass before", ...D.passes.map((pass, k) => `${k} ${pass.name}`)].map(
    (text, k) => new Option(text, k - 1, false, k - 1 === now.with)));
}
const isUnfolded = new Set([""]);
let rows = [];  // of the tree
function addScope(scope, times = 1) {
  const canOpen = scope.children.length > 0, isOpen = canOpen && isUnfolded.has(scope.path), seen = new Set();
  rows.push({ ...scope, times, isOpen, canOpen });
  for (const child of isOpen ? scope.children : []) {
    const { first, last } = v.units.get(child.path) ?? {};
    const equal = scope.children.filter(({ path }) => first < last && v.units.get(path)?.first === first);
    if (!equal.length) addScope(child);
    else if (!seen.has(first)) addEqual(equal, `${first} – ${last}: ${equal.length} equal`);
    seen.add(first);
  }
}
function addEqual(layers, label) {  // equal layers: one of them, the others folded
  const [{ level, path }] = layers, key = `${path} …`, isOpen = isUnfolded.has(key);
  const shown = layers.find(layer => inside(now.scope, layer.path)) ?? layers[0];
  addScope(shown, layers.length);
  rows.push({ path: key, label, level, count: "", isOpen, canOpen: true, isGroup: true });
  for (const layer of isOpen ? layers : []) if (layer !== shown) addScope(layer);
}
function drawTree() {
  rows = [];
  addScope(v.scopes.get(""));
  for (const f of v.state.functions)
    if (f !== v.f) rows.push({ path: "", label: f.name, level: 1, fn: f.name, count: "" });
  const current = rows.findIndex(row => row.path === now.scope && !row.fn);
  redraw(at("tree"), rows.map((row, k) => el("div", {
    role: "treeitem", "aria-level": row.level, "aria-selected": String(k === current), title: row.path,
    "aria-expanded": row.canOpen && String(row.isOpen), tabindex: k === Math.max(0, current) ? 0 : -1,
    "data-key": row.path, style: `padding-left: ${row.level * 0.8 - 0.5}em`,
    onclick: event => event.target.tagName === "B" ? fold(row) : openScope(row),
  }, el("b", {}, row.canOpen ? (row.isOpen ? "▾" : "▸") : ""), span("", row.label),
  el("i", {}, row.times > 1 ? `${row.count} × ${row.times}` : String(row.count)))));
  at("tree").children[current]?.scrollIntoView({ block: "nearest" });
}
function fold(row) {
  isUnfolded[row.isOpen ? "delete" : "add"](row.path);
  drawTree();
}
const openScope = row => row.isGroup ? fold(row) : go({ fn: row.fn ?? now.fn, scope: row.path, op: "" });
// ---- the bar over a view: the place, choices, the command
const quoted = word => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${String(word).replaceAll("'", `'"'"'`)}'`;
function commandsOf(kind) {
  const { name: pass, first, hits } = D.passes[now.pass], number = first + Math.max(1, hits.length) - 1;
  const fields = { name: now.op, scope: now.scope, pass, number };
  return (D.commands[kind] ?? []).map(text => text.replace(now.scope ? "" : " --scope {scope}", "")
    .replace(/\{(\w+)\}/g, (_, key) => quoted(fields[key] ?? "")));
}
function copyOf(text) {
  const code = el("code", { title: text }, text), button = el("button", { onclick: () => {
    getSelection().selectAllChildren(code);
    button.textContent = document.execCommand("copy") ? "copied" : "selected";
  } }, "copy");
  return div("copy", code, button);
}
const chooser = (label, key, texts) => el("label", { class: "soft" }, label, " ",
  el("select", { onchange: event => go({ [key]: event.target.value }) },
    texts.map(([value, text]) => new Option(text, value, false, value === now[key]))));
function barOf() {
  const kind = ["graph", "text"].includes(now.tab) ? "scope" : "page";
  const overlays = [["", "none"], ["us", "expected time"], ["bytes", "bytes"]];
  D.overlays.forEach((over, k) => overlays.push([String(k), over.title]));
  const stages = D.stages.map((stage, k) => [k, `${stage.ranks.join(", ")}: ${stage.function}`]);
  const legend = D.mesh.map(([axis, size]) =>
    el("span", { class: "axis", style: hue(axis) }, span("swatch"), `${axis}=${size} `));
  return [now.scope ? a({ scope: parent(now.scope), op: "" }, "↑ ", now.scope) : v.f.name,
    now.tab === "graph" ? [chooser("overlay", "over", overlays), legend, span("swatch sum"), "partial"] : [],
    ["kernels", "memory"].includes(now.tab) && stages[1] ? chooser("ranks", "stage", stages) : [],
    [...commandsOf(now.tab), ...commandsOf(kind)].slice(0, 1).map(copyOf)];
}
// ---- long lists: only the rows in sight are in the document
function listOf(items, make, chosen = -1) {
  const height = 22, inner = el("div", { style: `height: ${items.length * height}px` });
  const box = el("div", { class: "list", tabindex: 0, role: "group", "aria-label": now.tab }, inner);
  let range = "";
  box.fill = () => {
    const from = Math.max(0, Math.floor(box.scrollTop / height) - 15);
    const shown = items.slice(from, from + Math.ceil(box.clientHeight / height) + 30);
    if (range === (range = `${from} ${shown.length}`)) return;
    inner.replaceChildren(...shown.map(make));
    [...inner.children].forEach((row, k) => {
      row.style.top = `${(from + k) * height}px`;
      row.classList.toggle("on", from + k === chosen);
    });
    inner.style.minWidth = `${Math.max(parseInt(inner.style.minWidth) || 0, box.scrollWidth)}px`;
  };
  box.scrollIntoView = () => {
    const y = chosen * height - box.scrollTop;
    if (chosen >= 0 && (y < 0 || y + height > box.clientHeight)) box.scrollTop += y - box.clientHeight / 3;
  };
  box.addEventListener("scroll", box.fill, { passive: true });
  new ResizeObserver(box.fill).observe(box);
  return box;
}
// ---- the graph of a scope
function graphOf(scope) {  // the graph of the scope, or of the nearest scope around it that has one
  for (let path = scope; ; path = parent(path)) {
    const { graphs } = v.f, unit = [...v.units.values()].find(({ path: u }) => u && inside(plain(path), u));
    const below = unit?.graphs[path.slice(unit.path.length).replace(/^\./, "")];
    if (Object.hasOwn(graphs, path)) return { graph: D.graphs[graphs[path]], ops: v.ops, n: -1, path };
    if (D.graphs[below]) return { graph: D.graphs[below], ops: unit.ops, n: unit.n, path };
  }
}
const overlayValues = D.overlays.map(over => new Map(Object.entries(over.values)));
const overlayOf = (over, key, counted) => counted[over] ?? overlayValues[over]?.get(key) ?? -1;  // -1: none
const overlayText = (over, value) => value < 0 ? "" : over === "us" ? time(value)
  : over === "bytes" ? bytes(value) : digits(value) + D.overlays[over].unit;
function drawGraph() {
  const { graph: [w, h, nodes, edges], ops, n, path } = graphOf(now.scope);
  const places = nodes.map(([what, x, y]) => {
    const op = ops[what], scope = op ? op.scope : put(what[0], what[2] >= 0 ? what[2] : n);
    const value = op ? overlayOf(now.over, op.isLast && op.key, op)
      : overlayOf(now.over, scope, { us: sumIn(scope, "us"), bytes: sumIn(scope, "bytes") });
    return { op, what, scope, value, x: 20 + x * 118, y: 16 + y * 74 };
  });
  const made = new Set(places.map(({ op }) => op)), isOutside = o => o >= 0 && !made.has(v.values[o].op);
  const stubs = made.has(undefined) ? [] : places.flatMap(({ op }, to) =>
    op.ins.filter(isOutside).map(o => [-1, to, D.types.indexOf(v.values[o].type), v.names[o]]));
  const most = Math.max(...places.map(place => place.value)), lines = [...edges, ...stubs];
  const ports = Map.groupBy(lines, ([, to]) => to), left = ([from]) => places[from]?.x ?? Infinity;
  for (const list of ports.values()) list.sort((p, q) => left(p) - left(q));
  const size = [w * 118 + 12, h * 74 + 20], [width, height] = size.map(n => `${n / 13}em`);
  return svg("svg", { width, height, viewBox: `0 0 ${size.join(" ")}` },
    lines.map(line => edgeOf(line, places, ports.get(line[1]))),
    places.map(place => nodeOf(place, most, path)));
}
function edgeOf(edge, places, siblings) {  // around the nodes between its ends; short from outside (-1)
  const [from, to, type, name = ""] = edge, count = siblings.length, k = siblings.indexOf(edge);
  const y2 = places[to].y, x2 = places[to].x + 104 + (k - (count - 1) / 2) * Math.min(22, 150 / count);
  const { x, y } = places[from] ?? { x: x2 - 104, y: y2 - 60 }, y1 = y + 46, x1 = x + 104;
  const middle = (x1 + x2) / 2, shift = 9 + 3 * (from % 4), side = k < count - 1 ? -1 : 1;
  const curve = (p, q, r, s) => `C${p},${(q + s) / 2} ${r},${(q + s) / 2} ${r},${s}`;
  const between = places.filter(place => place.y > y && place.y < y2);
  const lanes = [middle, ...between.flatMap(place => [place.x - shift, place.x + 208 + shift])]
    .filter(x => between.every(place => x < place.x - 3 || x > place.x + 211))
    .sort((p, q) => Math.abs(p - middle) - Math.abs(q - middle)), lane = lanes[0] ?? x1;
  const around = `${curve(x1, y1, lane, y1 + 28)}V${y2 - 28}${curve(lane, y2 - 28, x2, y2)}`;
  const [text, , partial] = D.types[type] ?? ["", [], []], axis = axisOf(D.types[type]);
  const label = svg("text", { class: "small stub", x: x2 + 6 * side, y: y2 - 5,
    "text-anchor": side < 0 ? "end" : "start" }, k && side < 0 ? "" : cut(name, 13));
  return [svg("path", { class: partial.length ? "edge partial" : "edge", style: hue(axis),
    d: `M${x1},${y1}${between.length ? around : curve(x1, y1, x2, y2)}` }, svg("title", {}, name, " ", text)), label];
}
function nodeOf({ op, what, scope, value, x, y }, most, path) {
  const chosen = opOf(now.op), isChosen = chosen && (op ? op === chosen : inside(chosen.scope, scope));
  const times = op ? 1 : what[3] - what[2] + 1, comm = op?.comm, amount = overlayText(now.over, value);
  const type = op?.types[0] ?? ["", [], []], axis = comm?.[1] ?? axisOf(type);
  const name = op ? op.op : scope.slice(path && inside(scope, path) ? path.length + 1 : 0);
  const head = cut(times > 1 ? `${name} – ${what[3]}` : name, 26), room = 28 - 1.14 * head.length;
  const right = op ? (op.names && op.key) : times > 1 ? `× ${times}` : "";
  const second = !op ? plural(what[1] / times, "operation") + (times > 1 ? " each" : "")
    : comm ? `${comm[2]} ranks · ${bytes(comm[3])} · ${time(comm[4])}` : type[0].split(" of ")[0];
  const full = op ? el("i", {}, lineOf(v, op)).textContent : `${scope}: ${second} ${right}`;
  const rect = (kind, x, y, width, height) => svg("rect", { class: kind, x, y, width, height });
  const text = (x, y, word, kind, anchor) => svg("text", { x, y, class: kind, "text-anchor": anchor }, word);
  const ranks = Math.min(comm?.[2] ?? 0, 16), width = 210 / ranks - 2;  // a bar for each rank that takes part
  const open = () => go(op ? changeToOp(op) : { scope, op: "" });
  return svg("g", { class: `node${isChosen ? " chosen" : ""}${inside(scope, plain(now.scope)) ? "" : " dim"}`,
    transform: `translate(${x},${y})`, style: hue(axis), role: "button", tabindex: 0, "aria-label": full,
    "data-key": op?.key ?? scope, onclick: open, onkeydown: event => event.key === "Enter" && open() },
  svg("title", {}, full), times > 1 ? rect("box", 5, 5, 208, 46) : [], rect("box", 0, 0, 208, 46),
  comm ? rect("tint", 0, 0, 208, 46) : [], value > 0 ? rect("heat", 14, 41, 186 * value / most, 3) : [],
  Array.from({ length: ranks }, (_, k) => rect("fill", k * (width + 2), 48, width, 5)),
  type[2][0] ? svg("path", { class: "stripes", d: "M4,1V45" }) : axis ? rect("fill", 0, 0, 5, 46) : [],
  text(14, 19, head), text(14, 35, cut(second, amount ? 27 - amount.length : 29), "small"),
  room > 3 ? text(200, 19, cut(right, room), "small", "end") : [], text(200, 35, amount, "small", "end"));
}
// ---- text and differences
const rowOf = (view, op, ...extra) => el("div", { onclick: event =>
  event.target.tagName !== "A" && view === v && go(changeToOp(op)) }, extra, span("", lineOf(view, op)));
function drawText() {
  const ops = opsIn(now.scope);
  return listOf(ops, op => rowOf(v, op), ops.indexOf(opOf(now.op)));
}
const kindOf = op => op.kind ??=
  [op.op, op.scope, op.attributes, op.present, op.types.map(([text]) => text)].join("\n");
function diffOf([from, to]) {  // per layer or scope: lines [sign, view, operation], whatever values are named
  const x = viewOf(from, now.fn), y = viewOf(to, now.fn), old = y.names.map((_, value) => {
    value += y.start;
    for (let p = to; p > from && value !== undefined; p--) value = originOf(p, value)[2][0];
    return value - x.start;
  });
  const isEqual = (op, other) => kindOf(op) === kindOf(other)
    && (!op.names || other === x.values[old[op.first]]?.op)
    && op.ins.every((o, j) => (o >= 0 ? old[o] : o) === other.ins[j]);
  return [...new Set([...x.units.keys(), ...y.units.keys()])].map(path => {
    const [gone, come] = [x, y].map(view => view.units.get(path)?.ops ?? []), lines = [];
    let next = 0, added = [];
    for (const op of come) {
      const k = gone.findIndex((other, k) => k >= next && isEqual(op, other));
      if (k < 0 && added.push(["+", y, op])) continue;
      lines.push(...gone.slice(next, k).map(other => ["−", x, other]), ...added, [" ", y, op]);
      [next, added] = [k + 1, []];
    }
    lines.push(...gone.slice(next).map(other => ["−", x, other]), ...added);
    const words = lines.map(([sign, , op]) => sign + op.op + op.types + op.attributes);
    const sizes = `${gone.length} → ${plural(come.length, "operation")}`;
    return { path, lines, sizes, shape: path.replace(/\d+$/, "") + words };
  });
}
function drawDiff() {
  const units = diffOf([before(), now.pass].sort((p, q) => p - q)), list = [];
  const changed = units.filter(({ lines }) => lines.some(([sign]) => sign !== " "));
  const shown = changed.filter(({ path }) => inside(path, now.scope) || inside(now.scope, path));
  for (const equal of Map.groupBy(shown, unit => unit.shape).values()) {
    const { path, lines, sizes } = equal[0], last = equal.at(-1).path.split(".").at(-1);
    const title = (path || v.f.name) + (equal.length > 1 ? ` – ${last}: × ${equal.length}` : "");
    list.push(() => div("", el("b", {}, title), span("soft", sizes)));
    for (let k = 0, end; k < lines.length; k = end) {
      for (end = k; lines[end]?.[0] === " ";) end++;
      const count = end - k;
      if (count > 3) list.push(() => div("soft", `  … ${count} unchanged`));
      list.push(...lines.slice(count > 3 ? end : k, ++end).map(line => () => diffRow(line)));
    }
  }
  const equal = plural(units.length - changed.length, "unchanged scope");
  list.push(() => div("soft", `… ${equal}, ${changed.length - shown.length} changed elsewhere`));
  return listOf(list, make => make());
}
function diffRow([sign, view, op]) {
  const [made] = sign === "+" && op.names && view === v ? originsOf(now.pass, view.start + op.first) : [];
  const hit = made?.pass > before() && made.hit > 0 ? `#${made.hit}` : "";
  const row = rowOf(view, op, span("", sign), hit && a({ pass: made.pass, tab: "pass" }, hit));
  row.classList.add({ "+": "added", "−": "removed", " ": "same" }[sign]);
  row.title = hit && hitOf(made.pass, made.hit).join("\n");
  return row;
}
// ---- passes, kernels, memory, decisions
function drawPass() {
  const pass = D.passes[now.pass], made = Map.groupBy(pass.origins[1], ([, , hit]) => hit);
  const title = text => [el("b", {}, text)], columns = (rule, where) => [cell(14, rule), cell(26, where)];
  const hits = pass.hits.map((_, k) => {
    const n = pass.first + k, [rule, line, where, text] = hitOf(now.pass, n);
    const values = (made.get(n) ?? []).map(([value]) => value - v.start).filter(value => v.names[value]);
    return [cell(3, "#" + n), ...columns(rule, where), values.map(o => link(v, o)), span("", line), text];
  });
  const misses = pass.misses.map(([miss, n]) => D.misses[miss].map(s => put(s, n)))
    .map(([rule, , where, reason]) => [...columns(rule, where), reason]);
  return listOf([title(pass.text || pass.name), [`${pass.before} → ${plural(pass.after, "operation")}`],
    ...Object.entries(pass.counts).map(pair => [pair.join(": ")]), ...pass.notes.map(text => [text]),
    title(plural(hits.length, "rewrite")), ...hits, title(plural(misses.length, "match failure")), ...misses],
  row => div("", row));
}
const valueLink = (view, value) => view.names[value] ? link(view, value) : S[-1 - value] ?? "";
function drawKernels(stage) {
  const view = viewOf(LAST, stage.function), chosen = view.names.indexOf(now.op), { steps, unit } = stage;
  const most = Math.max(...steps.map(step => Math.max(step[2], step[5])));
  const row = (label, texts, meters, values) => div("", cell(18, label),
    texts.map(text => cell(6, text, "cell number")), span("meter", meters), values);
  const meter = us => el("i", { style: `width: ${100 * Math.max(0, us) / most}%` });
  const items = [[unit, []], ...steps], head = () => row(unit, ["expected", "measured", "bytes"], [], "values");
  return listOf(items, ([label, values, us, size, , measured]) => us === undefined ? head() : row(S[label],
    [time(us), time(measured), bytes(size)], [meter(us), meter(measured)],
    values.map(value => valueLink(view, value))), items.findIndex(([, values]) => values.includes(chosen)));
}
function drawMemory(stage) {
  const { places, count, size, peak, live, unit } = stage, w = 1000, h = 300, x = w * (peak + 0.5) / count;
  const view = viewOf(LAST, stage.function), typeOf = value => view.values[value]?.type;
  const sizes = Object.entries(D.sizes).map(pair => pair.join("=")).join(", ");
  const rects = places.map(([value, first, last, offset, n]) => svg("rect", { x: w * first / count,
    class: `place${view.names[value] === now.op ? " chosen" : ""}`, y: h - h * (offset + n) / size,
    width: w * (last + 1 - first) / count, height: h * n / size, style: hue(axisOf(typeOf(value))),
    onclick: () => value >= 0 && go(changeTo(view, value)) },
  svg("title", {}, `${view.names[value] ?? S[-1 - value]}: ${bytes(n)}, ${unit}s ${first} to ${last}`)));
  const held = live.slice(0, 100).map(k => [bytes(places[k][4]), valueLink(view, places[k][0]), " ",
    painted(typeOf(places[k][0])?.[0] ?? "")]);
  return div("pad", section(`Memory of rank${stage.ranks[1] ? "s" : ""} ${stage.ranks.join(", ")} at ${sizes}`,
    facts(Object.entries(stage.memory).map(([name, n]) => [name, n ? bytes(n) : ""]))),
  section(`Activations over ${plural(count, unit)}, ${bytes(size)}; the line is the peak`,
    svg("svg", { class: "wide", viewBox: `0 0 ${w} ${h}`, preserveAspectRatio: "none" }, rects,
      svg("path", { class: "peak", d: `M${x},0V${h}` }))),
  section(`Held at ${unit} ${peak}, the peak`, facts(held)));
}
const drawDecisions = () => el("table", { class: "mono pad decisions" }, D.decisions.map(([pass, ...texts]) =>
  el("tr", {}, el("td", {}, a({ pass, tab: "pass" }, D.passes[pass].name)), texts.map(s => el("td", {}, S[s])))));
const DRAW = { graph: drawGraph, text: drawText, diff: drawDiff, pass: drawPass, kernels: drawKernels,
  memory: drawMemory, decisions: drawDecisions };
if (!D.stages.length) for (const tab of ["kernels", "memory"]) delete DRAW[tab];
// ---- details of an operation or a scope
const usersOf = value => v.values[value].users.slice(0, 50).map(op =>
  div("mono", a(changeToOp(op), op.key), ` ${op.op}`));
function sideOf() {
  const op = opOf(now.op), value = v.names.indexOf(now.op), scope = v.scopes.get(plain(now.scope));
  if (op) return opSide(op);
  if (value >= 0)
    return section(now.op, "argument ", painted(v.values[value].type[0]), section("Used by", usersOf(value)));
  if (!scope) return section(now.scope, "no operations after this pass");
  return [section(scope.path || v.f.name, facts([["operations", scope.count],
    ["expected", time(sumIn(now.scope, "us"))], ["bytes", bytes(sumIn(now.scope, "bytes"))]])),
  section("Commands", commandsOf("scope").map(copyOf))];
}
function opSide(op) {
  const layout = op.types.flatMap(([text, sharded, partial, varying, whole]) => [
    ["type", painted(text.split(" of ")[0])], ["global", painted(whole)], ["sharded over", `${sharded}`],
    ["partial over", `${partial}`], ["varies over", `${varying}`]]);
  const chain = (op.names ? originsOf(now.pass, v.start + op.first) : []).map(({ pass, how, hit, old }) => {
    const from = old.map((name, k) => [k ? ", " : " from ", a({ pass: pass - 1, op: name }, name)]);
    const [rule, line, , text] = hitOf(pass, hit), made = `rewrite ${hit}: ${rule} ${line}`;
    return [a({ pass, tab: "pass" }, D.passes[pass].name), how, from,
      hit > 0 ? div("soft", made, el("pre", {}, text)) : ""];
  });
  const near = (D.lines[op.file] ?? []).filter(([n]) => Math.abs(n - op.line) < 4);
  const excerpt = near.map(([n, text]) => div(n === op.line ? "on" : "", `${n}  ${text}`));
  const find = () => searchFor(op.where, at("find").focus()), [, axis, size, sent] = op.comm ?? [];
  const more = el("button", { title: "all that comes from this line", onclick: find }, op.where);
  const overlays = D.overlays.map(({ title }, k) => [title, overlayText(k, overlayOf(k, op.isLast && op.key, {}))]);
  const steps = op.isLast ? D.stages.flatMap(stage => stage.function === v.f.name ? stage.steps : []) : [];
  const kernels = steps.filter(([, values, , , kernel]) => kernel >= 0 && values.includes(op.first));
  const ranks = axis ? `${bytes(sent)} by each of ${size} ranks of ${axis}` : "";
  return [section(op.op, el("pre", {}, lineOf(v, op))), section("Where it comes from",
    facts([["scope", a({ scope: op.scope }, op.scope)], ["line", more], ...chain]),
    el("pre", { class: "code" }, excerpt)), section("Layout", facts(layout)), section("Cost",
    facts([["expected", time(op.us)], ["bytes", bytes(op.bytes)], ["sends", ranks], ...overlays])),
  section("Reads", op.ins.map(o => div("mono", o >= 0 ? link(v, o) : o))),
  section("Used by", op.types.map((_, j) => usersOf(op.first + j))),
  section("Kernel", kernels.map(([label, , us, , kernel]) => el("details", {},
    el("summary", {}, `${S[label]}, ${time(us)}`), el("pre", { class: "code" }, S[D.kernels[kernel][1]])))),
  section("Commands", commandsOf("op").map(copyOf))];
}
// ---- search and keys
const indexes = new Map();
function indexOf(v) {  // [group, text, change, text to search] of all that is searched
  const found = indexes.get(v) ?? [];
  const add = (group, text, change) => found.push([group, text, change, text.toLowerCase()]);
  if (found.length) return found;
  for (const scope of v.scopes.keys()) add("Scopes", scope, { scope, op: "" });
  for (const op of v.ops) add("Operations", [op.names, op.op, ...op.ins.filter(o => o[0] === "@"),
    ...op.types.map(([text]) => text), op.where].join("  "), { op: op.key, scope: op.unit });
  for (const [file, lines] of Object.entries(D.lines)) for (const [n, text] of lines)
    add("Lines", `${file}:${n}  ${text}`, { op: v.ops.find(op => op.where === `${file}:${n}`)?.key ?? "" });
  indexes.set(v, found);
  return found;
}
function searchFor(text) {
  at("find").value = text;
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const hits = words.length ? indexOf(v).filter(entry => words.every(word => entry[3].includes(word))) : [];
  const groups = [...Map.groupBy(hits, ([group]) => group)].flatMap(([group, list]) => section(
    `${group} (${list.length})`, list.slice(0, 40).map(([, text, change]) => a(change, text))));
  at("found").hidden = !words.length;
  at("found").replaceChildren(...groups.flat(9), hits.length ? "" : "nothing found");
}
const KEYS = { "/": () => at("find").focus(), "?": () => at("keys").showModal(), Escape: () => go({ op: "" }),
  ArrowLeft: () => go({ pass: Math.max(0, now.pass - 1) }),
  ArrowRight: () => go({ pass: Math.min(LAST, now.pass + 1) }) };
function keysAt(target) {  // what keys do in the search, in the tree, elsewhere
  const links = [at("find"), ...at("found").querySelectorAll("a")], k = links.indexOf(target);
  const items = [...at("tree").children], j = items.indexOf(target), row = rows[j];
  if (k >= 0) return { ArrowDown: () => links[k + 1]?.focus(), ArrowUp: () => links[k - 1]?.focus(),
    Enter: () => links[k || 1]?.click(), Escape: () => target.blur(at("found").hidden = true) };
  if (j < 0) return target.tagName === "SELECT" ? {} : KEYS;
  const focus = to => items[Math.min(items.length - 1, Math.max(0, to))].focus();
  const up = () => focus(rows.findLastIndex((other, to) => to < j && other.level < row.level));
  return { ...KEYS, ArrowDown: () => focus(j + 1), ArrowUp: () => focus(j - 1), Enter: () => openScope(row),
    ArrowRight: () => row.canOpen && !row.isOpen ? fold(row) : focus(j + 1), Home: () => focus(0),
    ArrowLeft: () => row.isOpen ? fold(row) : up(), End: () => focus(items.length) };
}
document.addEventListener("keydown", event => {
  const action = keysAt(event.target)[event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey || at("keys").open) return;
  event.preventDefault();
  action();
});
const hideFound = ({ target }) => { at("found").hidden = !target.closest(".find input, #side button"); };
document.addEventListener("click", hideFound);
for (const kind of ["input", "focus"]) at("find").addEventListener(kind, () => searchFor(at("find").value));
at("with").addEventListener("change", event => go({ with: event.target.value, tab: "diff" }));
at("help").addEventListener("click", KEYS["?"]);
at("facts").append(...D.facts.map(([name, text]) => el("span", { title: text }, el("small", {}, name), " ", text)));
addEventListener("hashchange", () => location.hash !== drawn && show());
show();
