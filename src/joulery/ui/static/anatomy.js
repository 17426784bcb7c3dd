// The icicle of a page: a tree as rows of boxes, as long as their energy; a click makes a box the whole width.
// Data: {n: name, e: joules, s: seconds, c: events, k: [children]}; a box shows what of its length its children leave.
"use strict";
(() => {
  const ROW = 24, ROWS = 9, LETTER = 7.2, SVG = "http://www.w3.org/2000/svg";
  const element = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const joules = (value) => {
    for (const [factor, unit] of [[1e3, "kJ"], [1, "J"], [1e-3, "mJ"], [1e-6, "µJ"]]) {
      if (value >= factor) return Number((value / factor).toPrecision(3)) + " " + unit;
    }
    return value.toPrecision(3) + " J";
  };
  const heat = (share) => share <= 1e-4 ? 0 : Math.min(8, Math.floor((Math.log10(share) + 4) / 4 * 9));

  function icicle(place) {
    const root = JSON.parse(document.getElementById(place.dataset.tree).textContent);
    const crumbs = document.createElement("nav");
    crumbs.className = "crumbs";
    crumbs.setAttribute("aria-label", "Where you are");
    const svg = element("svg", {class: "icicle", role: "tree", "aria-label": "Energy by module"});
    place.replaceChildren(crumbs, svg);

    let shown = [root];
    function show(path) {
      shown = path;
      const width = Math.max(320, place.clientWidth), top = path[path.length - 1];
      svg.replaceChildren();
      svg.setAttribute("height", ROW * ROWS);
      svg.setAttribute("viewBox", "0 0 " + width + " " + ROW * ROWS);
      const draw = (node, trail, x, length, row) => {
        if (length < 1.5 || row >= ROWS) return;
        const share = root.e > 0 ? node.e / root.e : 0, step = heat(share);
        const box = element("g", {tabindex: "0", role: "treeitem", "aria-label": node.n + " " + joules(node.e)});
        box.append(element("title", {}, trail.map((one) => one.n).join("/") + "\n" + joules(node.e) + ", " +
          (share * 100).toPrecision(3) + " % of all\n" + node.c + " events, " + node.s.toPrecision(3) + " s"));
        box.append(element("rect", {x, y: row * ROW, width: length, height: ROW, class: "box heat" + step}));
        const letters = Math.floor((length - 8) / LETTER);
        if (letters > 2) {
          const words = node.n + " " + (share * 100).toPrecision(3) + " %";
          const text = words.length > letters ? words.slice(0, letters - 1) + "…" : words;
          box.append(element("text", {x: x + 4, y: row * ROW + 16, class: "on-heat" + step}, text));
        }
        const open = () => show(trail);
        box.addEventListener("click", open);
        box.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); } });
        svg.append(box);
        let at = x;
        for (const child of node.k || []) {
          const part = node.e > 0 ? length * child.e / node.e : 0;
          draw(child, trail.concat(child), at, part, row + 1);
          at += part;
        }
      };
      draw(top, path, 0, width, 0);
      crumbs.replaceChildren(...path.flatMap((node, depth) => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = node.n;
        button.addEventListener("click", () => show(path.slice(0, depth + 1)));
        return depth ? ["/", button] : [button];
      }));
      place.dataset.shown = path.map((node) => node.n).join("/");
    }
    show(shown);
    new ResizeObserver(() => show(shown)).observe(place);
  }
  document.querySelectorAll("[data-tree]").forEach(icicle);
})();
