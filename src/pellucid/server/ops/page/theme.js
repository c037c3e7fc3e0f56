// The theme before the first paint: the reader's choice if there is one, else the system's.
{
  const chosen = localStorage.getItem("pellucid-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
