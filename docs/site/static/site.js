// Bring the current page into sight in a long navigation, which the theme shows from its beginning.
addEventListener("DOMContentLoaded", () => {
  const box = document.querySelector(".sidebar-scroll");
  const current = box?.querySelector(".current-page");
  if (!current) return;
  const below = current.getBoundingClientRect().bottom - box.getBoundingClientRect().bottom;
  if (below > 0) box.scrollTo({ top: below + box.clientHeight / 2, behavior: "instant" });
});
