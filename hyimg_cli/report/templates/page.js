"use strict";
// Both pictures stand in the page once; the slider borrows them.
for (const slider of document.querySelectorAll(".slider")) {
  const views = slider.parentElement;
  const stage = slider.querySelector(".stage");
  const input = slider.querySelector("input");
  for (const [part, side] of [["over", "before"], ["under", "after"]]) {
    const from = views.querySelector("img." + side);
    const to = slider.querySelector("." + part);
    to.src = from.src;
    to.classList.toggle("dots", from.classList.contains("dots"));
  }
  const move = () => stage.style.setProperty("--at", input.value + "%");
  input.addEventListener("input", move);
  move();
  slider.hidden = false;
}
