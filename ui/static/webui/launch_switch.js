// "GPU-first KV cache (Xavier)" in Xinference's own web UI.
//
// Added to every page of the UI by ui/webui.py. It watches the page, since the UI changes pages
// without loading them, and adds a section to the launch dialog and a link to running models. Where
// it does not know a dialog, as with a newer Xinference, it says so once in the console and leaves
// the page alone: launching with our options by "Additional Parameters" works as before.

import { findForm } from "./host_form.js";
import { LaunchSection } from "./launch_section.js";
import { linkPanel } from "./panel_link.js";
import { address } from "./server.js";

const LAUNCH_PAGE = /\/launch-model(\/|$)/;

/** The dialog's <form> -> its section; null for one that we do not know. */
const sections = new Map();
let waiting = false;
let said = false;

function sayOnce(reason) {
  if (said) return;
  said = true;
  console.info(
    `xinference-xavier: this launch dialog is not one that it knows (${reason}), so the switch ` +
      'is not shown. Give enable_xavier_gpu=true under "Additional Parameters" instead.',
  );
}

function attach(element) {
  const form = findForm(element);
  if (!form) {
    sayOnce("its form's values were not found");
    return null;
  }
  return new LaunchSection(element, form, (reason) => {
    sayOnce(reason);
    sections.get(element)?.dispose();
    sections.set(element, null);
  });
}

function look() {
  waiting = false;
  for (const [element, section] of sections) {
    if (element.isConnected && (!section || section.isIn(element))) continue;
    section?.dispose();
    sections.delete(element);
  }
  if (LAUNCH_PAGE.test(location.pathname)) {
    for (const element of document.querySelectorAll('[role="dialog"] form')) {
      if (!sections.has(element)) sections.set(element, guarded(() => attach(element)));
    }
  }
  guarded(linkPanel);
  for (const section of sections.values()) guarded(() => section?.update());
}

/** The page is not ours: whatever it holds, no error of ours may spread in it. */
function guarded(action) {
  try {
    return action();
  } catch (error) {
    sayOnce(String(error));
    return null;
  }
}

function lookSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(look);
}

const sheet = document.createElement("link");
sheet.rel = "stylesheet";
sheet.href = address("xavier-ui/launch_switch.css");
document.head.append(sheet);

new MutationObserver(lookSoon).observe(document.documentElement, {
  childList: true,
  characterData: true,
  subtree: true,
  attributes: true,
  attributeFilter: ["lang"],
});
lookSoon();
