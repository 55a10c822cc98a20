"use strict";
// Lets a reader point at a sample or a token. Everything it shows stands on the page already.

const within = (figure, selector) => [...figure.querySelectorAll(selector)];

// One place at a time: chosen with the slider (keyboard, touch) or by pointing into a plot. `show` tells about it.
function scrubber(figure, places, show) {
  const slider = figure.querySelector("input[type=range]");
  const go = place => {
    slider.value = Math.max(0, Math.min(places - 1, place));
    for (const cursor of within(figure, ".cursor")) {
      const at = `${100 * (Number(slider.value) + 0.5) / places}%`;
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      cursor.setAttribute("visibility", "visible");
    }
    const text = show(Number(slider.value));
    figure.querySelector("output").textContent = text;
    slider.setAttribute("aria-valuetext", text);
  };
  slider.addEventListener("input", () => go(Number(slider.value)));
  for (const plot of within(figure, ".plot > svg")) {
    const point = event => {
      const box = plot.getBoundingClientRect();
      go(Math.floor(places * (event.clientX - box.left) / box.width));
    };
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
  }
  figure.querySelector(".controls").hidden = false;
  figure.classList.add("live");
  return go;
}

for (const figure of document.querySelectorAll(".scrub[data-bins]")) {
  const series = JSON.parse(figure.dataset.bins);
  const names = within(figure, "[data-lane]").map(lane => lane.dataset.lane);
  const most = Math.max(...series.map(bins => bins.length));
  scrubber(figure, most, place => {
    const told = series.map((bins, index) => {
      const [first, last, low, high] = bins[Math.min(bins.length - 1, place)];
      const numbers = first === last ? `sample ${first}` : `samples ${first} to ${last}`;
      return [numbers, `${names[index]} ${low === high ? low : `${low} to ${high}`} ms`];
    });
    return `${told[0][0]}: ${told.map(([, text]) => text).join(", ")}`;
  });
}

for (const map of document.querySelectorAll(".map")) {
  const tokens = within(map, ".t");
  const rows = within(map, ".scores tbody tr");
  const heads = within(map, ".scores thead th").slice(2).map(head => head.textContent);
  const go = scrubber(map, tokens.length, place => {
    for (const token of within(map, ".here")) token.classList.remove("here");
    tokens[place].classList.add("here");
    const cells = [...rows[place].cells].slice(2).map(cell => cell.textContent);
    const ran = heads.filter((_, index) => cells[index].endsWith("+"));
    const scores = heads.map((head, index) => `${head} ${cells[index]}`).join(", ");
    const word = tokens[place].textContent.trim();
    return `position ${place}, ${word ? `\u201c${word}\u201d` : "blank"}: ${ran.length ? `ran in ${ran.join(", ")}` : "no routed layer ran it"} (scores: ${scores})`;
  });
  tokens.forEach((token, place) => {
    token.addEventListener("pointerenter", () => go(place));
    token.addEventListener("click", () => {
      go(place);
      map.querySelector("input[type=range]").focus({ preventScroll: true });
    });
  });
  for (const choice of within(map, "input[type=radio]")) {
    choice.addEventListener("change", () => {
      map.dataset.layer = choice.value;
      for (const token of tokens) token.classList.toggle("on", token.dataset.l.includes(` ${choice.value} `));
      for (const lane of within(map, ".lane")) {
        lane.classList.toggle("off", choice.value !== "all" && lane.dataset.lane !== choice.value);
      }
    });
  }
}

// Paper has no way to open anything. The style sheet says so too, for browsers that can open details by style.
const opened = [];
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not([open]):not(.bulk)")) {
    details.open = true;
    opened.push(details);
  }
});
addEventListener("afterprint", () => opened.splice(0).forEach(details => { details.open = false; }));
