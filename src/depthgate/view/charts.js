// Reads numbers off line charts: by pointing at one, or by arrow keys once it has the focus.
(() => {
  const points = (line) => line.dataset.values.split(" ").map((pair) => pair.split(",").map(Number));
  const places = (line) => line.getAttribute("points").split(" ").map((pair) => Number(pair.split(",")[0]));

  function tell(svg, x) {
    const said = svg.parentElement.querySelector(".said"), parts = new Map();
    for (const line of svg.querySelectorAll("polyline[data-values]")) {
      const at = places(line), i = at.reduce((best, place, n) => Math.abs(place - x) < Math.abs(at[best] - x) ? n : best, 0);
      const [value, height] = points(line)[i], far = Math.abs(at[i] - x), name = line.dataset.name;
      if (!parts.has(name) || far < parts.get(name).far) parts.set(name, { far, at: at[i], value, text: `${name} ${height} at ${value}` });
    }
    if (!parts.size) return;
    said.textContent = [...parts.values()].map((part) => part.text).join("; ");
    const nearest = [...parts.values()].reduce((best, part) => part.far < best.far ? part : best);
    let mark = svg.querySelector(".cursor");
    if (!mark) {
      mark = document.createElementNS("http://www.w3.org/2000/svg", "line");
      mark.setAttribute("class", "cursor");
      svg.append(mark);
    }
    const [top, bottom] = svg.dataset.plot.split(" ");
    for (const [name, value] of [["x1", nearest.at], ["x2", nearest.at], ["y1", top], ["y2", bottom]]) mark.setAttribute(name, value);
    svg.dataset.at = nearest.at;
    svg.dataset.value = nearest.value;
  }

  document.addEventListener("mousemove", (event) => {
    const svg = event.target.closest?.("svg[data-plot]");
    if (svg) tell(svg, new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x);
  });
  // A chart was drawn anew: the same value is read off it, wherever it now stands.
  document.addEventListener("again", (event) => {
    const all = [...event.target.querySelectorAll("polyline[data-values]")].flatMap((line) => {
      const at = places(line);
      return points(line).map(([value], i) => ({ at: at[i], far: Math.abs(value - event.detail) }));
    });
    if (all.length) tell(event.target, all.reduce((best, point) => point.far < best.far ? point : best).at);
  });
  document.addEventListener("keydown", (event) => {
    const svg = event.target.closest?.("svg[data-plot]"), way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!svg || !way) return;
    event.preventDefault();
    const all = [...new Set([...svg.querySelectorAll("polyline[data-values]")].flatMap(places))].sort((a, b) => a - b);
    const now = "at" in svg.dataset ? all.indexOf(Number(svg.dataset.at)) + way : 0;
    if (all.length) tell(svg, all[Math.max(0, Math.min(all.length - 1, now))]);
  });
})();
