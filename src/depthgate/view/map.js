// The map of routing decisions: layers down, tokens across, and a strip of the whole text below it to move along in.
// A cell has two halves: the upper is full where the causal rule routes the token, the lower where the top k does.
// Data comes from the page, text goes in as text only.
(() => {
  const data = JSON.parse(document.getElementById("routes").textContent);
  const canvas = document.getElementById("map"), strip = document.getElementById("overview"), said = document.getElementById("said");
  const T = data.tokens.length, L = data.layers.length, FONT = "12px system-ui, 'DejaVu Sans', sans-serif";
  const mixed = data.computed.some(Boolean);  // whether any layer is compared with its other choice
  const head = (t) => data.heads[t] ?? data.tokens[t], wide = (text) => { pen.font = FONT; return pen.measureText(text).width; };
  const pen = document.createElement("canvas").getContext("2d");
  const names = data.layers.map((name) => { let text = String(name); while (wide(text) > 130) text = "…" + text.slice(2); return text; });
  // Where nearly all tokens are single characters these stand upright above their columns, words from below to above.
  const letters = data.tokens.filter((_, t) => [...head(t)].length > 1).length < 0.1 * T;
  const LEFT = Math.ceil(Math.max(...names.map(wide))) + 16, TOP = letters ? 22 : 76, ROW = Math.max(18, Math.min(64, Math.floor(288 / L)));
  const LEAST = letters ? 5.4 : 11;  // pixels of a column that can be named
  let from = 0, to = 0, at = { t: -1, l: 0 }, pinned = false, base = null, waiting = false, drag = null;
  Object.assign(canvas.dataset, { left: LEFT, top: TOP, row: ROW });

  const number = (packed) => packed === null ? "not a number" : packed / 10000;
  const on = (rows, l, t) => rows[l][t] === "1";
  const ran = (l, t) => on(data.computed[l] === "top_k" ? data.top_k : data.causal, l, t);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const step = () => (canvas.clientWidth - LEFT) / (to - from);

  function sized(each, high) {
    const ratio = window.devicePixelRatio || 1, across = canvas.parentElement.clientWidth;
    each.style.height = high + "px";
    each.width = Math.round(across * ratio);
    each.height = Math.round(high * ratio);
    const g = each.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    return [g, across];
  }

  // All cells, drawn once for what is in view: the mark of the cell that is looked at moves over them.
  function paint() {
    const high = TOP + L * ROW + 4;
    sized(canvas, high);
    to = Math.min(T, to || from + Math.max(8, Math.min(200, Math.floor((canvas.parentElement.clientWidth - LEFT) / LEAST))));
    base = document.createElement("canvas");
    const [g, width] = sized(base, high), across = (width - LEFT) / (to - from);
    canvas.dataset.from = from;
    canvas.dataset.to = to;
    const [text, quiet, band, both, odd] = ["--text", "--quiet", "--band", "--mod", "--odd"].map(colour);
    g.textBaseline = "middle";
    for (let l = 0; l < L; l++) {
      const y = TOP + l * ROW, half = (ROW - 2) / 2;
      g.font = FONT;
      g.fillStyle = text;
      g.textAlign = "right";
      g.fillText(names[l], LEFT - 8, y + ROW / 2);
      g.fillStyle = band;
      g.fillRect(LEFT, y + 1, width - LEFT, ROW - 2);
      for (let t = from; t < to; t++) {
        const a = on(data.causal, l, t), b = on(data.top_k, l, t);
        if (!a && !b) continue;
        g.fillStyle = a && b ? both : odd;
        g.globalAlpha = (mixed && !data.computed[l] ? 0.45 : 1) * Math.min(1, across);  // many on a pixel: their share of it
        g.fillRect(LEFT + (t - from) * across, y + 1 + (a ? 0 : half), Math.max(1, across - (across > 4 ? 1 : 0)), a && b ? ROW - 2 : half);
      }
      g.globalAlpha = 1;
    }
    if (across >= LEAST - 0.6) label(g, across, text);
    else {
      g.fillStyle = quiet;
      g.textAlign = "left";
      g.fillText("token " + from, LEFT, TOP - 11);
      g.textAlign = "right";
      g.fillText("token " + (to - 1), width, TOP - 11);
    }
    overview();
    mark();
  }

  function label(g, across, text) {
    g.fillStyle = text;
    g.font = `${letters ? Math.max(9, Math.min(14, 1.6 * across)) : 12}px ui-monospace, Menlo, 'DejaVu Sans Mono', monospace`;
    for (let t = from; t < to; t++) {
      const x = LEFT + (t - from + 0.5) * across, shown = [...head(t)];
      if (letters) {
        g.textAlign = "center";
        g.fillText(shown.length > 1 && across < 8 * shown.length ? "▪" : shown.join(""), x, TOP / 2);
      } else {
        g.save();
        g.translate(x, TOP - 4);
        g.rotate(-Math.PI / 2);
        g.textAlign = "left";
        g.fillText(shown.length > 9 ? shown.slice(0, 8).join("") + "…" : shown.join(""), 0, 0);
        g.restore();
      }
    }
  }

  // The share of all cells that were computed, along the whole text, and a frame around what the map shows.
  function overview() {
    strip.hidden = from === 0 && to === T;
    if (strip.hidden) return;
    const [g, width] = sized(strip, 40), across = width - LEFT, most = shares.reduce((a, b) => Math.max(a, b), 1e-9);
    g.fillStyle = colour("--band");
    g.fillRect(LEFT, 0, across, 40);
    g.fillStyle = colour("--mod");
    shares.forEach((share, i) => g.fillRect(LEFT + i * across / shares.length, 38 - 34 * share / most, across / shares.length + 0.3, 34 * share / most));
    g.strokeStyle = colour("--text");
    g.lineWidth = 2;
    g.strokeRect(LEFT + from / T * across, 1, Math.max(4, (to - from) / T * across), 38);
    g.fillStyle = colour("--quiet");
    g.font = FONT;
    g.textAlign = "right";
    g.textBaseline = "middle";
    g.fillText("all", LEFT - 8, 20);
  }
  const groups = Math.min(T, 300), shares = Array.from({ length: groups }, (_, i) => {
    const [a, b] = [Math.floor(i * T / groups), Math.floor((i + 1) * T / groups)];
    let sum = 0;
    for (let l = 0; l < L; l++) for (let t = a; t < b; t++) sum += ran(l, t);
    return sum / (L * (b - a));
  });

  function mark() {
    const g = canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
    waiting = false;
    if (!base.width) return;  // hidden: it will be painted when it has a size
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, canvas.width, canvas.height);
    g.drawImage(base, 0, 0);
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.strokeStyle = colour("--text");
    g.lineWidth = 2;
    if (at.t >= from && at.t < to) g.strokeRect(LEFT + (at.t - from) * step(), TOP + at.l * ROW, Math.max(3, step()), ROW);
  }

  function part(tag, text, name) {
    const made = document.createElement(tag);
    made.textContent = text;
    if (name) made.className = name;
    return made;
  }

  // The token, what the layer decided, and the text around it.
  function tell() {
    const { t, l } = at, a = on(data.causal, l, t), b = on(data.top_k, l, t), near = letters ? 24 : 7;
    const [mine, best] = data.computed[l] === "top_k" ? ["skipped, but routed by the causal rule", "routed, but not by the causal rule"]
      : ["routed causally, not by the top k", "skipped causally, but in the top k"];
    const how = a && b ? "routed" : a ? mine : b ? best : "skipped";
    const gate = a || data.gates[l][t] !== 0 ? ", gate " + number(data.gates[l][t]) : "", around = part("span", "", "around");
    const texts = (start, end) => Array.from({ length: Math.max(0, end - start) }, (_, i) => head(start + i)).join("");
    around.append(texts(Math.max(0, t - near), t), part("mark", head(t)), texts(t + 1, Math.min(T, t + 1 + near)));
    // The token in an element of its own: if it runs from right to left, the rest of the line does not.
    said.replaceChildren(`Token ${t} "`, part("bdi", data.tokens[t]), `", layer ${data.layers[l]}: ${how}, score ${number(data.scores[l][t])}${gate}`, around);
    if (!waiting) { waiting = true; requestAnimationFrame(mark); }
  }

  function place(event) {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left - LEFT, l = Math.floor((event.clientY - box.top - TOP) / ROW);
    if (x < -1 || l < 0 || l >= L) return null;
    const t = from + Math.floor(x / ((box.width - LEFT) / (to - from)));
    return { t: Math.max(from, Math.min(to - 1, t)), l };
  }

  // Whether there was anything to move to: where not, the window may scroll.
  function view(start, span) {
    const first = Math.max(0, Math.min(T - span, Math.round(start)));
    if (first === from && first + span === to) return false;
    from = first;
    to = first + span;
    paint();
    return true;
  }

  // About the cell that is looked at, if it is in view.
  function zoom(factor, centre = at.t >= from && at.t < to ? at.t : (from + to) / 2) {
    const span = Math.max(Math.min(8, T), Math.min(T, Math.round((to - from) * factor)));
    return view(centre - (centre - from) / Math.max(1, to - from) * span, span);
  }

  function show(t) {
    at.t = t;
    if (t < from || t >= to) view(t - ((to - from) >> 1), to - from);
    tell();
  }

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button === 0) drag = { x: event.clientX, from, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag && event.buttons) {
      const x = event.clientX - drag.x;
      if (!drag.moved && Math.abs(x) < 5) return;  // a click may tremble
      if (!drag.moved) canvas.setPointerCapture(event.pointerId);
      drag.moved = true;
      view(drag.from - x / step(), to - from);
      return;
    }
    const found = !pinned && place(event);
    if (found) { at = found; tell(); }
  });
  canvas.addEventListener("click", (event) => {
    const moved = drag?.moved, found = place(event);
    drag = null;
    if (found && !moved) { at = found; pinned = event.pointerType === "mouse" && !pinned; tell(); }
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("wheel", (event) => {
    const found = place(event), { deltaX, deltaY, shiftKey } = event;
    const along = shiftKey || Math.abs(deltaX) > Math.abs(deltaY), far = (along && deltaX) || deltaY;
    // With ctrl the whole page is zoomed; and it scrolls over a map that was not clicked on.
    if (!found || event.ctrlKey || !(along || document.activeElement === canvas)) return;
    const moved = along ? view(from + Math.sign(far) * Math.max(1, Math.abs(far) / step()), to - from)
      : zoom(far > 0 ? 1.25 : 0.8, found.t);
    if (moved) event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("focus", () => { if (at.t < 0) at.t = from; tell(); });
  canvas.addEventListener("keydown", (event) => {
    const { key } = event, move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
    const page = { PageUp: -1, PageDown: 1 }[key];
    if (move) { at.l = Math.max(0, Math.min(L - 1, at.l + move[1])); show(Math.max(0, Math.min(T - 1, at.t + move[0]))); }
    else if (page) show(Math.max(0, Math.min(T - 1, at.t + page * (to - from))));
    else if (key === "Home") show(0);
    else if (key === "End") show(T - 1);
    else if (key === "+" || key === "=") zoom(0.5);
    else if (key === "-") zoom(2);
    else return;
    event.preventDefault();
  });
  for (const kind of ["pointerdown", "pointermove"]) strip.addEventListener(kind, (event) => {
    if (!event.buttons) return;
    strip.setPointerCapture(event.pointerId);
    const box = strip.getBoundingClientRect(), t = (event.clientX - box.left - LEFT) / (box.width - LEFT) * T;
    view(t - (to - from) / 2, to - from);
  });
  document.getElementById("closer").addEventListener("click", () => zoom(0.5));
  document.getElementById("wider").addEventListener("click", () => zoom(2));
  document.getElementById("whole").addEventListener("click", () => view(0, T));
  document.addEventListener("click", (event) => {
    const span = event.target.closest("pre [data-t]");
    if (span) show(Number(span.dataset.t));
  });
  window.addEventListener("resize", paint);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  paint();
})();
