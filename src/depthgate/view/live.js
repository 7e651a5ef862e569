// A page of a run that goes on: loads itself again, with what was chosen on it, unless asked to wait or looked at closely.
(() => {
  const button = document.getElementById("pause"), inputs = [...document.querySelectorAll(".axis input")];
  let kept = {};
  try { kept = JSON.parse(sessionStorage.getItem("chosen") ?? "{}"); } catch { /* no storage: choices are lost */ }
  for (const each of inputs) {
    if (!(each.id in kept)) continue;
    if (each.type === "range") each.value = kept[each.id];
    else each.checked = kept[each.id];
  }
  button.addEventListener("click", () => {
    const paused = button.ariaPressed !== "true";
    button.ariaPressed = String(paused);
    button.textContent = paused ? "Go on reloading" : "Stop reloading";
  });
  setInterval(() => {
    const used = document.querySelector("main :focus-visible, .chart:hover");
    document.getElementById("waits").textContent = used ? "It waits while something on it is in use." : "";
    if (button.ariaPressed === "true" || used) return;
    const chosen = inputs.map((each) => [each.id, each.type === "range" ? each.value : each.checked]);
    try { sessionStorage.setItem("chosen", JSON.stringify(Object.fromEntries(chosen))); } catch { /* as above */ }
    location.reload();
  }, 15000);
})();
