// The map of routing decisions: layers down, tokens across. Data comes from the page, text goes in as text only.
(() => {
  const data = JSON.parse(document.getElementById("routes").textContent);
  const canvas = document.getElementById("map"), said = document.getElementById("said");
  const T = data.tokens.length, L = data.layers.length;
  const mixed = data.computed.some(Boolean);  // whether any layer is compared with its other choice
  const LEFT = 44, TOP = 22, ROW = 22;
  let from = 0, to = T, at = { t: 0, l: 0 }, pinned = false, base = null, waiting = false, drag = null;

  const number = (packed) => packed === null ? "not a number" : packed / 10000;
  const on = (rows, l, t) => rows[l][t] === "1";
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const step = () => (canvas.clientWidth - LEFT) / (to - from);

  // All cells, drawn once for what is in view: the mark of the cell that is looked at moves over them.
  function paint() {
    const ratio = window.devicePixelRatio || 1;
    const wide = canvas.parentElement.clientWidth, high = TOP + L * ROW + 6;
    canvas.style.height = high + "px";
    canvas.dataset.from = from;
    canvas.dataset.to = to;
    base = document.createElement("canvas");
    for (const each of [canvas, base]) { each.width = Math.round(wide * ratio); each.height = Math.round(high * ratio); }
    const g = base.getContext("2d"), across = (wide - LEFT) / (to - from);
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    const [text, quiet, band, both, mine, best] =
      ["--text", "--quiet", "--band", "--c0", "--c1", "--c2"].map(colour), alone = colour("--c3");
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    for (let l = 0; l < L; l++) {
      const y = TOP + l * ROW;
      g.fillStyle = quiet;
      g.textAlign = "right";
      g.fillText(data.layers[l], LEFT - 8, y + ROW / 2);
      g.fillStyle = band;
      g.fillRect(LEFT, y + 1, wide - LEFT, ROW - 2);
      for (let t = from; t < to; t++) {
        const a = on(data.causal, l, t), b = on(data.top_k, l, t);
        if (!a && !b) continue;
        g.fillStyle = a && b ? (mixed && !data.computed[l] ? alone : both) : a ? mine : best;
        const x = LEFT + (t - from) * across, w = Math.max(0.6, across - (across > 4 ? 1 : 0));
        if (a) g.fillRect(x, y + 1, w, ROW - 2);
        else g.fillRect(x, y + ROW - 7, w, 5);  // the top k alone: a low bar
      }
    }
    g.textAlign = "center";
    g.fillStyle = text;
    if (across >= 14) {
      for (let t = from; t < to; t++) g.fillText([...(data.heads[t] ?? data.tokens[t])].slice(0, Math.floor(across / 7)).join(""), LEFT + (t - from + .5) * across, TOP / 2);
    } else {
      g.fillStyle = quiet;
      g.textAlign = "left";
      g.fillText("token " + from, LEFT, TOP / 2);
      g.textAlign = "right";
      g.fillText("token " + (to - 1), wide, TOP / 2);
    }
    mark();
  }

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

  function tell() {
    const { t, l } = at, a = on(data.causal, l, t), b = on(data.top_k, l, t);
    const [mine, best] = data.computed[l] === "top_k" ? ["skipped, but routed by the causal rule", "routed, but not by the causal rule"]
      : ["routed causally, not by the top k", "skipped causally, but in the top k"];
    const how = a && b ? "routed" : a ? mine : b ? best : "skipped";
    const gate = a || data.gates[l][t] !== 0 ? ", gate " + number(data.gates[l][t]) : "", name = document.createElement("bdi");
    name.textContent = data.tokens[t];  // in an element of its own: if it runs from right to left, the rest of the line does not
    said.replaceChildren(`Token ${t} "`, name, `", layer ${data.layers[l]}: ${how}, score ${number(data.scores[l][t])}${gate}`);
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

  function zoom(factor, centre) {
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
    if (found && !moved) { at = found; pinned = !pinned; tell(); }
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("wheel", (event) => {
    const found = place(event), { deltaX, deltaY, shiftKey } = event;
    if (!found || event.ctrlKey) return;  // with ctrl the whole page is zoomed
    const along = shiftKey || Math.abs(deltaX) > Math.abs(deltaY), far = (along && deltaX) || deltaY;
    const moved = along ? view(from + Math.sign(far) * Math.max(1, Math.abs(far) / step()), to - from)
      : zoom(far > 0 ? 1.25 : 0.8, found.t);
    if (moved) event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("focus", tell);
  canvas.addEventListener("keydown", (event) => {
    const { key } = event, move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
    if (move) { at.l = Math.max(0, Math.min(L - 1, at.l + move[1])); show(Math.max(0, Math.min(T - 1, at.t + move[0]))); }
    else if (key === "Home") show(0);
    else if (key === "End") show(T - 1);
    else if (key === "+" || key === "=") zoom(0.5, at.t);
    else if (key === "-") zoom(2, at.t);
    else return;
    event.preventDefault();
  });
  document.getElementById("closer").addEventListener("click", () => zoom(0.5, at.t));
  document.getElementById("wider").addEventListener("click", () => zoom(2, at.t));
  document.getElementById("whole").addEventListener("click", () => view(0, T));
  document.addEventListener("click", (event) => {
    const span = event.target.closest("pre [data-t]");
    if (span) show(Number(span.dataset.t));
  });
  window.addEventListener("resize", paint);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  paint();
})();
