// Brings the trace of the answer that the address names into the step viewer. Stands in the viewer's page, after its own script.
addEventListener("keydown", (event) => { // a frame keeps its keys to itself
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) parent.postMessage("leave", location.origin);
});
(async () => {
  const key = sessionStorage.getItem("outpace.key");
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const { theme } = JSON.parse(localStorage.getItem("outpace.settings") || "{}");
  if (theme) document.documentElement.dataset.theme = theme;
  const cut = document.getElementById("cut");
  try {
    const response = await fetch(`../v1/traces/${location.hash.slice(1)}`, { headers });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const told = await response.json();
    told.sources = JSON.parse(sessionStorage.getItem("outpace.drafters") || "[]"); // as the chat colours them
    document.getElementById("trace").textContent = JSON.stringify(told);
    start();
  } catch (error) {
    cut.textContent = error.message;
    cut.hidden = false;
  }
})();
