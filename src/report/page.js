"use strict";
(() => {
  // Theme: what the system says, unless the reader says otherwise.
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  const kept = () => { try { return localStorage.getItem("oscar-theme"); } catch { return null; } };
  const show = (theme) => {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = "Theme: " + theme;
  };
  let theme = themes.includes(kept()) ? kept() : "auto";
  show(theme);
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    show(theme);
    try { localStorage.setItem("oscar-theme", theme); } catch { /* a page from a file may keep nothing */ }
  });

  const pick = document.getElementById("pick");
  if (pick) {
    const choose = () => {
      for (const layer of document.querySelectorAll("svg .layer")) {
        layer.classList.toggle("on", layer.dataset.layer === pick.value);
      }
    };
    pick.addEventListener("change", choose);
    choose();
  }

  const data = document.getElementById("errors");
  if (!data) return;
  const { layers, errors } = JSON.parse(data.textContent);
  for (const map of document.querySelectorAll(".heat")) {
    const { measure, method, plot } = map.dataset;
    const cells = errors[measure][method];
    const heads = Math.max(1, ...cells.map((column) => column.length));
    const [x0, y0, x1, y1] = plot.split(" ").map(Number);
    const width = (x1 - x0) / layers.length;
    const height = (y1 - y0) / heads;
    const svg = map.querySelector("svg");
    const readout = map.closest(".measure").querySelector(".readout");
    let cursor = null;
    let at = null;
    const clear = () => {
      if (cursor) cursor.remove();
      cursor = null;
    };
    const go = (column, head) => {
      at = [Math.min(layers.length - 1, Math.max(0, column)), Math.min(heads - 1, Math.max(0, head))];
      if (!cursor) {
        cursor = document.createElementNS("http://www.w3.org/2000/svg", "rect");
        cursor.classList.add("cursor");
        svg.append(cursor);
      }
      const box = { x: x0 + at[0] * width, y: y0 + at[1] * height, width, height };
      for (const key in box) cursor.setAttribute(key, box[key]);
      const of = (name) => {
        const column = errors[measure][name][at[0]];
        const error = column && column[at[1]];
        return name + " " + (error == null ? "not measured" : error);
      };
      const others = Object.keys(errors[measure]).filter((name) => name !== method);
      readout.textContent = "Layer " + layers[at[0]] + ", head " + at[1] + ": " + [method, ...others].map(of).join(", ");
    };
    map.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const unit = svg.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * unit;
      const y = (event.clientY - box.top) * unit;
      if (x < x0 || x >= x1 || y < y0 || y >= y1) return clear();
      go(Math.floor((x - x0) / width), Math.floor((y - y0) / height));
    });
    map.addEventListener("pointerleave", clear);
    map.addEventListener("focus", () => { if (map.matches(":focus-visible")) go(...(at || [0, 0])); });
    map.addEventListener("blur", clear);
    map.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const [column, head] = at || [0, 0];
      go(column + step[0], head + step[1]);
    });
  }
})();
