// A link to the cache's panel beside the buttons of a running model.
//
// The page of running models heads its details with the model's uid (an h4) and a row of buttons.
// The link stands in that row, for models that keep a cache.

import { address, ask } from "./server.js";
import { text } from "./texts.js";

const PAGE = /\/running-model\/?$/;
const ASK_AFTER_MS = 10_000;

let cached = new Set();
let askedAt = -Infinity;

/** Put the link where it belongs on the page as it is now. */
export function linkPanel() {
  if (!PAGE.test(location.pathname)) return;
  for (const heading of document.querySelectorAll("h4")) {
    const actions = buttonsBeside(heading);
    if (actions) showLink(actions, heading.textContent.trim());
  }
}

function buttonsBeside(heading) {
  const title = heading.parentElement;
  const actions = title?.nextElementSibling;
  const isRow = actions?.tagName === "DIV" && actions.querySelector('[data-slot="button"], button');
  return isRow ? actions : null;
}

function showLink(actions, uid) {
  const link = actions.querySelector(":scope > .xavier-panel-link");
  if (!cached.has(uid)) {
    link?.remove();
    void askAgain();
    return;
  }
  const shown = link ?? document.createElement("a");
  shown.className = "xavier-panel-link";
  // The same tab: the token that the panel's page looks for is in this tab's sessionStorage.
  shown.href = address(`xavier/?model=${encodeURIComponent(uid)}`);
  shown.title = text("panel_hint");
  if (shown.textContent !== text("panel")) shown.textContent = text("panel");
  if (!link) actions.prepend(shown);
}

/** Ask which models keep a cache, seldom; a replica shows up seconds after its launch. */
async function askAgain() {
  const wait = askedAt + ASK_AFTER_MS - performance.now();
  if (wait > 0) return;
  askedAt = performance.now();
  setTimeout(() => requestAnimationFrame(linkPanel), ASK_AFTER_MS + 1);
  const answer = await ask("v1/xavier");
  if (!answer) return;
  cached = new Set(answer.models.map((model) => model.model_uid));
  linkPanel();
}
