// Draws the charts of a page by uPlot, each when it is first seen. Values are read by pointing, or by arrow keys.
(() => {
  const DASHES = [[], [9, 4], [2, 3], [9, 4, 2, 4], [5, 3], [12, 3, 2, 3, 2, 3]];  // series differ in more than colour
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
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

  function drawn({ kind, colour, name }, chart) {
    const stroke = css(`--c${colour % 6}`), dash = DASHES[(colour + Math.floor(colour / 6)) % 6], bars = kind === "bar";
    const at = (u, i) => chart.names?.length ? chart.names[u.data[0][i]] : written(u.data[0][i], 8);
    const look = { label: name, stroke, width: 2.5, value: (u, y, _, i) => y == null ? "" : `${written(y)} at ${at(u, i)}` };
    if (kind === "mark") return { ...look, paths: () => null, points: { show: true, size: 9, fill: stroke, stroke: css("--page"), width: 1 } };
    if (bars) return { ...look, width: 0, fill: stroke, paths: uPlot.paths.bars({ size: chart.names.length ? [0.8, 60] : [1, Infinity] }), points: { show: false } };
    return { ...look, dash: kind === "even" ? DASHES[1] : dash, points: { show: false, filter: lone, size: 8, fill: stroke } };
  }

  // The whole of an axis, with a little room at its ends; a part of it that was zoomed to, as it is.
  function across(chart) {
    return (u, low, high) => {
      const xs = u.data[0];
      if (low == null || !xs.length) return chart.logX ? [1, 10] : [0, 1];
      if (low > xs[0] || high < xs[xs.length - 1]) return [low, high];
      if (chart.logX) return [low / 1.12, high * 1.12];
      const step = chart.series[0].kind === "bar" ? (high - low) / Math.max(1, xs.length - 1) || 1 : 0;
      const room = step ? 0.6 * step : low === high ? 0.5 : 0.01 * (high - low);
      return [low - room, high + room];
    };
  }

  function upright(chart) {
    return (u, low, high) => {
      if (low == null) return [0, 1];
      if (chart.fromZero) [low, high] = [Math.min(0, low), Math.max(0, high)];
      const room = 0.08 * (high - low) || 0.1 * Math.abs(high) || 0.5;
      return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];  // below 0 only where a value is
    };
  }

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
    const text = css("--text"), line = css("--line"), font = "13px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
    const axis = { stroke: text, font, labelFont: font, ticks: { stroke: line, width: 1, size: 5 }, gap: 4, values: (_, marks) => marks.map((mark) => written(mark, 8)) };
    const names = chart.names ?? [], widest = 7 * Math.max(0, ...names.map((name) => name.length)) + 12;
    const named = names.length && {
      splits: () => names.map((_, i) => i).filter((i) => i % Math.max(1, Math.ceil(names.length * widest / (width - 80))) === 0),
      values: (_, marks) => marks.map((i) => names[i]),
    };
    return {
      width,
      height: 300,
      legend: { markers: { width: 3, dash: (u, number) => chart.series[number - 1].kind === "mark" ? "dotted" : u.series[number].dash?.length ? "dashed" : "solid" } },
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
      scales: { x: { time: false, distr: chart.logX ? 3 : 1, range: across(chart) }, y: { range: upright(chart) } },
      axes: [
        { ...axis, label: chart.x || undefined, size: 30, labelSize: 20, labelGap: 2, grid: { show: false }, ...(chart.logX && { splits: few, filter: (_, marks) => marks }), ...named },
        { ...axis, label: chart.y, labelSize: 20, grid: { stroke: line, width: 1 }, size: (_, marks) => 18 + 7.5 * Math.max(2, ...(marks ?? []).map((mark) => String(mark).length)) },
      ],
      series: [{}, ...chart.series.map((each) => drawn(each, chart))],
    };
  }

  function draw(place) {
    const chart = JSON.parse(place.dataset.chart);
    place.chart?.destroy();
    place.chart = new uPlot(options(chart, place.clientWidth), aligned(chart.series), place);
    const legend = place.querySelector(".u-legend");
    legend.setAttribute("role", "status");
    legend.setAttribute("aria-live", "polite");
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
    const middle = u.cursor.idx == null ? (a + b) / 2 : log ? Math.log(u.data[0][u.cursor.idx]) : u.data[0][u.cursor.idx];
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
  const places = document.querySelectorAll("[data-chart]");
  places.forEach((place) => watch.observe(place));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => places.forEach((place) => place.chart && draw(place)));
})();
