// Brings the trace of the answer that the address names into the step viewer. Stands in the viewer's page, after its own script.
(async () => {
  const key = sessionStorage.getItem("outpace.key");
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const { theme } = JSON.parse(localStorage.getItem("outpace.settings") || "{}");
  if (theme) document.documentElement.dataset.theme = theme;
  const cut = document.getElementById("cut");
  try {
    const response = await fetch(`../v1/traces/${location.hash.slice(1)}`, { headers });
    if (!response.ok) throw new Error((await response.json()).error.message);
    document.getElementById("trace").textContent = await response.text();
    start();
  } catch (error) {
    cut.textContent = error.message;
    cut.hidden = false;
  }
})();
