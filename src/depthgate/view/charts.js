// Draws the charts of a page by uPlot, each when it is first seen. Values are read by pointing, or by arrow keys.
(() => {
  const DASHES = [[], [9, 4], [2, 3], [9, 4, 2, 4], [5, 3], [12, 3, 2, 3, 2, 3]];  // series differ in more than colour
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const hex = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  // A colour of the page, of which `shade` is that of text (or, below 0, of the page): series of one kind differ in it.
  const tint = (name, shade) => {
    const [own, other] = [hex(css(`--${name}`)), hex(css(shade > 0 ? "--text" : "--page"))];
    return shade ? `rgb(${own.map((c, i) => Math.round(c + Math.abs(shade) * (other[i] - c))).join(" ")})` : css(`--${name}`);
  };
  const wish = (id) => document.getElementById(id);  // what a reader of runs may choose, where the page lets them
  // A number on an axis: 20 M, where that is all of it.
  const marked = (value) => {
    const [unit, name] = [[1e18, " E"], [1e15, " P"], [1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]].find(([each]) => Math.abs(value) >= each) ?? [1, ""];
    const short = Number((value / unit).toPrecision(4));
    return Math.abs(value) >= 1e4 && Math.abs(short * unit - value) <= 1e-9 * Math.abs(value) ? short + name : written(value, 8);
  };
  const written = (value, digits = 5) => value == null ? "" : String(Number(value.toPrecision(digits)));

  // uPlot wants one list of places for all series. One that a series has twice stands there twice.
  function aligned(series) {
    const all = series.map(({ points }) => {
      const times = new Map();
      return new Map(points.map(([x, y]) => {
        const n = times.get(x) ?? 0;
        times.set(x, n + 1);
        return [`${x} ${n}`, y];  // y is null in a gap; where a series has no such place its line goes on
      }));
    });
    const keys = [...new Set(all.flatMap((each) => [...each.keys()]))], parts = new Map(keys.map((key) => [key, key.split(" ").map(Number)]));
    keys.sort((a, b) => parts.get(a)[0] - parts.get(b)[0] || parts.get(a)[1] - parts.get(b)[1]);
    return [keys.map((key) => parts.get(key)[0]), ...all.map((each) => keys.map((key) => each.get(key)))];
  }

  // Points of a line that have a gap on both sides: no line would show them.
  function lone(u, number) {
    const known = u.data[number].flatMap((y, i) => y === undefined ? [] : [i]), y = (n) => u.data[number][known[n]] ?? null;
    return known.filter((_, n) => y(n) !== null && y(n - 1) === null && y(n + 1) === null);
  }

  // The running mean of a line: the weight of what was before is `keep`, and of the first points as much as there is.
  function smooth(points, keep) {
    let mean = 0, weight = 0;
    return points.map(([x, y]) => {
      if (y == null) return [x, y];
      mean = keep * mean + (1 - keep) * y;
      weight = keep * weight + (1 - keep);
      return [x, mean / weight];
    });
  }

  const ring = (points) => points[0]?.length === 4;  // a minimum, with its intervals

  function drawn({ kind, colour, shade, dash: number, name, points }, chart) {
    const stroke = tint(colour, shade), dash = DASHES[(number + Math.floor(number / 6)) % 6], bars = kind === "bar";
    const at = (u, i) => chart.names?.length ? chart.names[u.data[0][i]] : written(u.data[0][i], 8);
    const look = { label: name, stroke, width: 2.5, value: (u, y, _, i) => y == null ? "" : `${written(y)} at ${at(u, i)}` };
    if (ring(points)) return { ...look, paths: () => null, points: { show: true, size: 13, fill: css("--page"), stroke, width: 3 } };
    if (kind === "mark") return { ...look, paths: () => null, points: { show: true, size: 8, fill: stroke, stroke: css("--page"), width: 1 } };
    if (bars) return { ...look, width: 0, fill: stroke, paths: uPlot.paths.bars({ size: chart.names.length ? [0.8, 60] : [1, Infinity] }), points: { show: false } };
    return { ...look, dash: kind === "even" ? DASHES[1] : dash, points: { show: false, filter: lone, size: 8, fill: stroke } };
  }

  // Intervals of points, and a place that is marked across.
  function extras(chart) {
    return (u) => {
      const g = u.ctx, { left, top, width, height } = u.bbox, ratio = uPlot.pxRatio;
      g.save();
      g.beginPath();
      g.rect(left, top, width, height);
      g.clip();
      g.lineWidth = 2 * ratio;
      const line = (x0, y0, x1, y1) => { g.beginPath(); g.moveTo(x0, y0); g.lineTo(x1, y1); g.stroke(); };
      chart.series.forEach(({ points, colour, shade }, n) => u.series[n + 1].show && points.forEach(([atX, atY, across, upright]) => {
        const x = u.valToPos(atX, "x", true), y = u.valToPos(atY, "y", true), cap = 5 * ratio;
        g.strokeStyle = tint(colour, shade);
        if (across) {
          const [a, b] = across.map((end) => u.valToPos(end, "x", true));
          line(a, y, b, y); line(a, y - cap, a, y + cap); line(b, y - cap, b, y + cap);
        }
        if (upright) {
          const [a, b] = upright.map((end) => u.valToPos(end, "y", true));
          line(x, a, x, b); line(x - cap, a, x + cap, a); line(x - cap, b, x + cap, b);
        }
      }));
      if (chart.at != null) {
        const x = u.valToPos(chart.at, "x", true), right = x < left + 0.6 * width;
        g.strokeStyle = g.fillStyle = css("--text");
        g.setLineDash([5 * ratio, 4 * ratio]);
        line(x, top, x, top + height);
        g.font = `${12 * ratio}px system-ui, 'DejaVu Sans', sans-serif`;
        g.textAlign = right ? "left" : "right";
        g.fillText(`top k from ${written(chart.at, 3)}`, x + (right ? 6 : -6) * ratio, top + 12 * ratio);
      }
      g.restore();
    };
  }

  // The whole of an axis, with a little room at its ends; a part of it that was zoomed to, as it is.
  function across(chart) {
    return (u, low, high) => {
      const xs = u.data[0];
      if (low == null || !xs.length) return chart.logX ? [1, 10] : [0, 1];
      if (low > xs[0] || high < xs[xs.length - 1]) return [low, high];
      const ends = [...(chart.logX ? [] : chart.span ?? []), ...chart.series.flatMap(({ points }) => points.flatMap(([, , wide]) => wide ?? []))];
      [low, high] = [Math.min(low, ...ends.filter((end) => !chart.logX || end > 0)), Math.max(high, ...ends)];
      if (chart.logX) return [low / 1.12, high * 1.12];
      const step = chart.series[0].kind === "bar" ? (high - low) / Math.max(1, xs.length - 1) || 1 : 0;
      const room = step ? 0.6 * step : low === high ? 0.5 : 0.01 * (high - low);
      return [low - room, high + room];
    };
  }

  // The first steps of a run are far above all others: they are left out until one asks for them, or looks at them.
  function upright(chart) {
    return (u, low, high) => {
      if (low == null) return [0, 1];
      const xs = u.data[0], first = xs[0], last = xs[xs.length - 1], [i0, i1] = u.series[0].idxs ?? [0, xs.length - 1];
      if (chart.axis === "loss" && !chart.logX && !wish("first-steps")?.checked && i0 === 0 && i1 === xs.length - 1 && xs.length > 60) {
        const late = xs.flatMap((x, i) => x < first + 0.05 * (last - first) ? [] : u.data.slice(1).map((ys) => ys[i])).filter((y) => y != null);
        if (late.length) high = Math.max(...late);
      }
      for (const { points } of chart.series) for (const [, , , ends] of points) if (ends) [low, high] = [Math.min(low, ends[0]), Math.max(high, ends[1])];
      if (chart.axis === "from_zero") [low, high] = [Math.min(0, low), Math.max(0, high)];
      if (logY(chart)) return [low / 1.03, high * 1.03];
      const room = 0.08 * (high - low) || 0.1 * Math.abs(high) || 0.5;
      return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];  // below 0 only where a value is
    };
  }
  const logY = (chart) => chart.axis === "loss" && wish("log-y")?.checked && chart.series.every(({ points }) => points.every(([, y]) => y == null || y > 0));

  // Numbers on a log axis: powers of ten, or as many of their multiples as give three of them at least, and not too many.
  // (uPlot's own never end where an axis begins below 1 between two of its marks.)
  function few(u, _, low, high) {
    let found = [];
    for (const times of [[1], [1, 2, 5], [1, 1.5, 2, 3, 5, 7], Array.from({ length: 90 }, (_, n) => 1 + n / 10)]) {
      found = [];
      for (let n = Math.floor(Math.log10(low)); n <= Math.log10(high); n++)
        found.push(...times.map((each) => Number(`${each}e${n}`)).filter((mark) => low <= mark && mark <= high));
      if (found.length >= 3) break;
    }
    return found.filter((_, i) => i % Math.ceil(found.length / 6) === 0);
  }

  function options(chart, width) {
    const upLog = logY(chart), text = css("--text"), line = css("--line"), font = "13px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
    const axis = { stroke: text, font, labelFont: font, ticks: { stroke: line, width: 1, size: 5 }, gap: 4, values: (_, marks) => marks.map(marked) };
    const names = chart.names ?? [], widest = 7 * Math.max(0, ...names.map((name) => name.length)) + 12;
    const named = names.length && {
      splits: () => names.map((_, i) => i).filter((i) => i % Math.max(1, Math.ceil(names.length * widest / (width - 80))) === 0),
      values: (_, marks) => marks.map((i) => names[i]),
    };
    return {
      width,
      height: 300,
      legend: { markers: { width: 3, dash: "solid" } },
      cursor: {
        points: { size: 9 },
        // Of each series the value nearest to the cursor, whatever places the other series have.
        dataIdx: (u, number, i) => {
          const ys = u.data[number], xs = u.data[0], far = (n) => Math.abs(xs[n] - xs[i]);
          let before = i, after = i;
          while (before >= 0 && ys[before] == null) before--;
          while (after < ys.length && ys[after] == null) after++;
          return before < 0 ? (after < ys.length ? after : null) : after < ys.length && far(after) < far(before) ? after : before;
        },
      },
      scales: { x: { time: false, distr: chart.logX ? 3 : 1, range: across(chart) }, y: { distr: upLog ? 3 : 1, range: upright(chart) } },
      axes: [
        { ...axis, label: chart.x || undefined, size: 30, labelSize: 20, labelGap: 2, grid: { show: false }, ...(chart.logX && { splits: few, filter: (_, marks) => marks }), ...named },
        { ...axis, label: chart.y, labelSize: 20, grid: { stroke: line, width: 1 }, size: (_, marks) => 18 + 7.5 * Math.max(2, ...(marks ?? []).map((mark) => String(mark).length)), ...(upLog && { splits: few, filter: (_, marks) => marks }) },
      ],
      series: [{}, ...chart.series.map((each) => drawn(each, chart))],
      hooks: { draw: [extras(chart)], setSeries: [(u) => u.root.querySelectorAll(".u-series th[role]").forEach((name, n) => { name.ariaPressed = String(u.series[n + 1].show); })] },
    };
  }

  // The scores of all tokens in a layer of the map, those of the computed ones over them, and where the top k begins.
  function histogram(layer) {
    const data = JSON.parse(document.getElementById("routes").textContent), flags = data[data.computed[layer] === "top_k" ? "top_k" : "causal"][layer];
    const known = data.scores[layer].flatMap((score, t) => score === null ? [] : [[score / 10000, flags[t] === "1"]]), all = known.map(([score]) => score);
    const low = all.reduce((a, b) => Math.min(a, b), Infinity), high = all.reduce((a, b) => Math.max(a, b), -Infinity), wide = (high - low) / 24 || 1;
    const counts = (some) => {
      const found = Array(24).fill(0);
      some.forEach((score) => found[Math.min(23, Math.floor((score - low) / wide))]++);
      return found.map((many, i) => [low + (i + 0.5) * wide, many]);
    };
    const bars = [["tokens", "quiet", -0.3, all], ["computed", "mod", 0, known.filter(([, on]) => on).map(([score]) => score)]];
    const series = bars.map(([name, colour, shade, some]) => ({ kind: "bar", name, colour, shade, dash: 0, points: all.length ? counts(some) : [] }));
    return { x: "router score", y: "tokens", names: [], axis: "from_zero", at: data.lowest[layer], series };
  }

  function draw(place) {
    let chart = JSON.parse(place.dataset.chart);
    if ("scores" in chart) chart = histogram(chart.scores);
    const keep = Number(wish("smooth")?.value ?? 0);
    chart.logX = chart.axis === "log_x";
    if (wish("log-x")?.checked) chart.logX = chart.series.every(({ points }) => points.every(([x]) => x > 0));
    if (keep && chart.smooth) for (const each of chart.series) if (each.kind === "line") each.points = smooth(each.points, keep);
    const before = place.chart, hidden = before?.series.filter(({ show }) => !show).map(({ label }) => label) ?? [];
    const { min, max } = before?.scales.x ?? {}, xs = before?.data[0] ?? [], zoomed = min > xs[0] || max < xs[xs.length - 1];
    before?.destroy();
    place.querySelector(".tools")?.remove();
    place.chart = new uPlot(options(chart, place.clientWidth), aligned(chart.series), place);
    const u = place.chart, legend = place.querySelector(".u-legend");
    u.series.forEach(({ label }, n) => { if (n && hidden.includes(label)) u.setSeries(n, { show: false }); });
    if (zoomed) u.setScale("x", { min, max });
    legend.setAttribute("role", "status");
    legend.setAttribute("aria-live", "polite");
    legend.classList.toggle("only", chart.series.length === 1 && !chart.named);  // one series needs no name: the axis has it
    legend.querySelectorAll(".u-series").forEach((row, n) => {
      if (!n) return;
      const name = row.querySelector("th");  // a click on it hides the line
      Object.assign(name, { tabIndex: 0, role: "button", ariaPressed: String(u.series[n].show) });
      name.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); name.click(); }
      });
      const dash = u.series[n].dash ?? [], ends = dash.reduce(([...at], size) => [...at, at.at(-1) + size], [0]), marker = row.querySelector(".u-marker");
      row.classList.add(ring(chart.series[n - 1].points) ? "minimum" : chart.series[n - 1].kind);
      if (dash.length && marker) {  // the dashes of the line itself
        const colour = marker.style.borderColor, parts = dash.map((_, i) => `${i % 2 ? "transparent" : colour} ${ends[i]}px ${ends[i + 1]}px`);
        Object.assign(marker.style, { borderColor: "transparent", background: `repeating-linear-gradient(90deg, ${parts}) border-box` });
      }
    });
    if (matchMedia("(pointer: coarse)").matches) {  // fingers have no other way to zoom
      const tools = document.createElement("p");
      tools.className = "tools";
      for (const [text, factor] of [["Zoom in", 0.5], ["Zoom out", 2], ["All", Infinity]]) {
        const button = tools.appendChild(document.createElement("button"));
        button.textContent = text;
        button.addEventListener("click", () => zoom(u, factor));
      }
      place.append(tools);
    }
    for (const kind of ["pointerdown", "pointermove"]) u.over.addEventListener(kind, ({ pointerType, offsetX, offsetY }) => {
      if (pointerType === "mouse") return;
      u.setCursor({ left: offsetX, top: offsetY });
      u.touched = u.posToVal(offsetX, "x");  // buttons zoom about it
    });
  }

  function step(u, way) {
    const xs = u.data[0], now = u.cursor.idx;
    let next = now ?? (way > 0 ? 0 : xs.length - 1);
    if (now != null) while (next >= 0 && next < xs.length && xs[next] === xs[now]) next += way;
    next = Math.max(0, Math.min(xs.length - 1, next));
    u.setCursor({ left: u.valToPos(xs[next], "x"), top: u.over.clientHeight / 2 });
  }

  function zoom(u, factor) {
    const { min, max } = u.scales.x, log = u.scales.x.distr === 3, [a, b] = log ? [Math.log(min), Math.log(max)] : [min, max];
    const at = u.cursor.idx == null ? u.touched : u.data[0][u.cursor.idx], seen = at >= min && at <= max;
    const middle = !seen ? (a + b) / 2 : log ? Math.log(at) : at;
    const ends = [middle - (middle - a) * factor, middle + (b - middle) * factor].map((end) => log ? Math.exp(end) : end), xs = u.data[0];
    u.setScale("x", { min: Math.max(xs[0], ends[0]), max: Math.min(xs[xs.length - 1], ends[1]) });
  }

  document.addEventListener("keydown", (event) => {
    const u = event.target.chart, way = { ArrowLeft: -1, ArrowRight: 1 }[event.key], factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (!u || !u.data[0].length || !(way || factor)) return;
    event.preventDefault();
    if (way) step(u, way);
    else zoom(u, factor);
  });
  const watch = new ResizeObserver((changes) => changes.forEach(({ target, contentRect: { width } }) => {
    if (!width) return;  // hidden: it is drawn when it has a size
    if (!target.chart) draw(target);
    else if (target.chart.width !== Math.floor(width)) target.chart.setSize({ width: Math.floor(width), height: 300 });
  }));
  const places = document.querySelectorAll("[data-chart]"), redraw = () => places.forEach((place) => place.chart && draw(place));
  places.forEach((place) => watch.observe(place));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  for (const id of ["smooth", "log-x", "log-y", "first-steps"]) wish(id)?.addEventListener("input", redraw);
  const tell = () => { if (wish("smooth")) wish("smoothed").textContent = wish("smooth").value; };
  wish("smooth")?.addEventListener("input", tell);
  tell();  // a page that was loaded again has a value already
})();
