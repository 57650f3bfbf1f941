// An open panel outlives the token it was opened with. When a request is refused, the token that
// Xinference's own pages keep in this tab (they renew it) is exchanged once more; else a line says
// what to do. Only the panel's own requests are looked at.
(() => {
  const prefix = location.pathname.match(/^(.*)\/xavier(?:\/|$)/)?.[1] ?? "";
  const home = prefix + "/xavier/";
  const plain = window.fetch.bind(window);
  let exchange = null;
  let lastTried = -Infinity;

  function signIn() {
    // Not more often than this: a panel asks every second, and the token may have ended as well.
    if (performance.now() - lastTried < 10_000) return exchange ?? Promise.resolve(false);
    lastTried = performance.now();
    const token = sessionStorage.getItem("token");
    if (!token) return (exchange = Promise.resolve(false));
    const headers = { Authorization: "Bearer " + token };
    exchange = plain(home + "session", { method: "POST", headers }).then(
      (answer) => answer.ok,
      () => false,
    );
    return exchange;
  }

  function say(ended) {
    document.getElementById("x-ended")?.remove();
    if (!ended) return;
    const line = document.createElement("div");
    line.id = "x-ended";
    line.setAttribute("role", "alert");
    line.append("Your Xinference session has ended; these numbers stand still. ");
    const link = document.createElement("a");
    link.href = prefix + "/login";
    link.textContent = "Log in again";
    line.append(link, ", then open the panel in the same tab.");
    (document.querySelector(".gradio-container") ?? document.body).append(line);
  }

  window.fetch = async (input, options) => {
    const answer = await plain(input, options);
    const path = new URL(typeof input === "string" ? input : (input.url ?? input), location.href).pathname;
    if (answer.status !== 401 || !path.startsWith(home)) {
      if (answer.ok && path.startsWith(home + "gradio_api/")) say(false);
      return answer;
    }
    // A Request's body has been read by now, so only what can be sent again is.
    const ok = await signIn();
    say(!ok);
    return ok && !(input instanceof Request) ? plain(input, options) : answer;
  };
})();
