// Small maps of weights over patches (or tokens): those of slots of Soft MoE, or gates of the patches that a layer computed.
// With an image, each map is that image, the greyer a patch the smaller its weight; without one, weights are colours.
document.querySelectorAll("canvas.small").forEach((canvas) => {
  const data = JSON.parse(document.getElementById(canvas.dataset.from).textContent);
  const said = document.getElementById(canvas.dataset.from + "-said");
  const image = JSON.parse(document.getElementById(canvas.dataset.image)?.textContent ?? "null");
  const { rows, columns } = data, most = Math.max(...data.weights.map((row) => Math.max(...row))) || 1;  // null: 0
  const names = image ? ["the image", ...data.names] : data.names, into = image ? [null, ...data.weights] : data.weights;
  const times = data.even ? `, ${Number((most / data.even).toPrecision(3))} times an even share` : "";
  document.getElementById(canvas.dataset.from + "-most").textContent = most + times;
  const LABEL = 16, GAP = 10, flat = rows === 1, low = image ? 1 : 0;
  let at = { slot: low, cell: -1 }, across = 1, cell = 8, high = 8, base = null, ratio = 1;

  const shade = (share) => {  // dark violet to light yellow, even steps of lightness
    const stops = [[13, 8, 35], [87, 21, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]];
    const x = Math.max(0, Math.min(1, share)) * 4, i = Math.min(3, Math.floor(x)), f = x - i;
    return `rgb(${stops[i].map((low, c) => Math.round(low + f * (stops[i + 1][c] - low))).join(" ")})`;
  };
  const place = (slot) => [(slot % across) * (columns * cell + GAP), Math.floor(slot / across) * (rows * high + LABEL + GAP)];

  const photo = image && document.createElement("canvas");
  if (image) {
    [photo.width, photo.height] = [image.width, image.height];
    const g = photo.getContext("2d"), pixels = g.createImageData(image.width, image.height), bytes = atob(image.rgb);
    for (let i = 0; i < image.width * image.height; i++) {
      for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = bytes.charCodeAt(3 * i + c);
      pixels.data[4 * i + 3] = 255;
    }
    g.putImageData(pixels, 0, 0);
  }

  function layout() {
    const wide = canvas.parentElement.clientWidth;
    across = flat ? 1 : Math.max(1, Math.floor((wide + GAP) / (130 + GAP)));
    across = Math.min(across, into.length);
    cell = flat ? wide / columns : Math.min(24, (wide - GAP * (across - 1)) / across / columns);
    if (image) cell = Math.floor(cell) || 1;  // no seams between what lies over it
    high = flat ? 16 : cell;
    if (image) high = Math.max(1, Math.round(cell * (image.height / rows) / (image.width / columns)));  // the shape of a patch
    const tall = Math.ceil(into.length / across) * (rows * high + LABEL + GAP);
    ratio = Math.min(window.devicePixelRatio || 1, Math.sqrt(16e6 / (wide * tall || 1)));  // larger ones some browsers do not draw
    canvas.style.height = tall + "px";
    [base] = [document.createElement("canvas")];
    for (const each of [canvas, base]) { each.width = Math.round(wide * ratio); each.height = Math.round(tall * ratio); }
    const g = base.getContext("2d");
    g.scale(ratio, ratio);
    g.font = "11px system-ui, sans-serif";
    g.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--text").trim();
    into.forEach((_, slot) => { const [x, y] = place(slot); g.fillText(names[slot], x, y + 11, columns * cell); });
    into.forEach((row, slot) => {
      const [x, y] = place(slot);
      if (photo) g.drawImage(photo, x, y + LABEL, columns * cell, rows * high);
      row?.forEach((weight, n) => {
        g.globalAlpha = photo && weight !== null ? 0.92 * (1 - Math.max(0, weight / most)) : 1;
        g.fillStyle = weight === null ? "#8a8f96" : photo ? "#7f7f7f" : shade(weight / most);
        const more = photo ? 0 : 0.3;  // covers the seams between cells
        g.fillRect(x + (n % columns) * cell, y + LABEL + Math.floor(n / columns) * high, cell + more, high + more);
      });
      g.globalAlpha = 1;
    });
    draw();
  }

  function draw() {
    const g = canvas.getContext("2d"), [x, y] = place(at.slot);
    if (!base.width) return;  // hidden: it will be painted when it has a size
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, canvas.width, canvas.height);
    g.drawImage(base, 0, 0);
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.lineWidth = 2;
    if (at.cell >= 0) for (const [colour, out] of [["#000", 1], ["#fff", 0]]) {  // seen on light and on dark
      g.strokeStyle = colour;
      g.strokeRect(x + (at.cell % columns) * cell - out, y + LABEL + Math.floor(at.cell / columns) * high - out, Math.max(3, cell) + 2 * out, high + 2 * out);
    }
  }

  function tell() {
    const n = at.cell, weight = into[at.slot][n];
    const where = flat ? `${data.what} ${n}` : `${data.what} in row ${Math.floor(n / columns)}, column ${n % columns}`;
    const times = data.even ? `, ${(weight / data.even).toFixed(2)} times an even share` : "";
    const told = weight === null ? "weight not a number" : `${data.even ? "weight" : "gate"} ${weight}${times}`;
    said.textContent = `${names[at.slot]}, ${where}: ${told}`;
    draw();
  }

  for (const kind of ["pointermove", "pointerdown"]) canvas.addEventListener(kind, (event) => {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const i = Math.floor(px / (columns * cell + GAP)), j = Math.floor(py / (rows * high + LABEL + GAP)), slot = j * across + i;
    if (i < 0 || i >= across || slot < low || slot >= into.length) return;
    const [x, y] = place(slot), c = Math.floor((px - x) / cell), r = Math.floor((py - y - LABEL) / high);
    if (c < 0 || c >= columns || r < 0 || r >= rows) return;
    at = { slot, cell: r * columns + c };
    tell();
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: flat ? 0 : -columns, ArrowDown: flat ? 0 : columns }[event.key];
    const turn = { PageUp: -1, PageDown: 1, ...(flat ? { ArrowUp: -1, ArrowDown: 1 } : {}) }[event.key];
    if (turn) at.slot = Math.max(low, Math.min(into.length - 1, at.slot + turn));
    else if (step) { if (at.cell + step >= 0 && at.cell + step < rows * columns) at.cell += step; }
    else return;
    event.preventDefault();
    tell();
  });
  canvas.addEventListener("focus", () => { at.cell = Math.max(0, at.cell); tell(); });
  window.addEventListener("resize", layout);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", layout);
  layout();
});
