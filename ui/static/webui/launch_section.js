// The part of the launch dialog that is ours: a switch, two budgets, with whom to share.
//
// It shows what the form's rows say and writes back to them; it has no values of its own. Whether
// a launch can work is asked of the server, whose rules are those of the launch itself.

import { OPTIONS, SWITCH } from "./host_form.js";
import { ask } from "./server.js";
import { text } from "./texts.js";

/** Fields: option -> what stands in an empty one, which is the option's default. */
const BUDGETS = { xavier_gpu_budget: "256MiB", xavier_cpu_budget: "auto" };
/** With whom: the replicas of the launch ("model", the default), nobody, or the cluster. */
const SHARES = ["", "off", "cluster"];
const VALIDATE_AFTER_MS = 300;
/** After this the dialog has drawn a row that was added to its form. */
const DRAWN_AFTER_MS = 1000;

let sections = 0;

/** One dialog's section. `dispose` ends it. */
export class LaunchSection {
  #form;
  #dialog;
  #disown;
  #element;
  #submitted;
  #end;
  #parts = {};
  #id = `xavier-launch-${(sections += 1)}`;
  /** What was set when the switch was last turned off, to set it again. */
  #kept = {};
  #asked = "";
  #verdict = { problem: null, warnings: [] };
  #timer;
  #call;

  /**
   * `element` is the dialog's <form>, `form` what findForm() made of it. `disown` is called with
   * a reason when the dialog turns out to be another than it seemed.
   */
  constructor(element, form, disown) {
    this.#form = form;
    this.#dialog = element;
    this.#disown = disown;
    this.#element = this.#build();
    const advanced = element.querySelector(':scope > * [data-slot="collapsible"]');
    const place = [...element.children].find((child) => child.contains(advanced));
    element.insertBefore(this.#element, place ?? null);
    this.#submitted = (event) => this.#holdBack(event);
    element.addEventListener("submit", this.#submitted, true);
    const end = form.subscribe(() => this.update());
    this.#end = () => {
      end();
      element.removeEventListener("submit", this.#submitted, true);
    };
    this.update();
  }

  dispose() {
    clearTimeout(this.#timer);
    this.#call?.abort();
    this.#end();
    this.#element.remove();
  }

  isIn(element) {
    return this.#element.isConnected && element.contains(this.#element);
  }

  /** Show what the form says now, in the page's language. */
  update() {
    if (this.#form.isOtherEngine()) this.#leaveEngine();
    const options = this.#form.options();
    const on = ["true", "1"].includes((options[SWITCH] ?? "").trim().toLowerCase());
    this.#element.hidden = !this.#form.isVllm();
    this.#parts.switch.setAttribute("aria-checked", String(on));
    this.#parts.fields.hidden = !on;
    for (const name of Object.keys(BUDGETS)) {
      setValue(this.#parts[name], options[name] ?? "");
    }
    const share = (options.xavier_share ?? "").trim().toLowerCase();
    setValue(this.#parts.xavier_share, SHARES.includes(share) ? share : "");
    for (const part of this.#element.querySelectorAll("[data-text]")) {
      setText(part, text(part.dataset.text));
    }
    this.#validate(options);
  }

  // The rows of our options would make a launch by another engine fail.
  #leaveEngine() {
    if (Object.keys(this.#form.options()).length > 0) this.#turn(false);
  }

  #turn(on) {
    const options = this.#form.options();
    if (on) {
      this.#form.setOptions({ ...this.#kept, ...options, [SWITCH]: "true" });
      setTimeout(() => this.#confirm(), DRAWN_AFTER_MS);
    } else {
      this.#kept = options;
      this.#form.setOptions(Object.fromEntries(OPTIONS.map((name) => [name, ""])));
    }
  }

  // A dialog that keeps additional parameters elsewhere would launch without the cache.
  #confirm() {
    if (!this.#element.isConnected || !(SWITCH in this.#form.options())) return;
    const shown = [...this.#dialog.querySelectorAll("input")].some((one) => one.value === SWITCH);
    if (shown) return;
    this.#turn(false);
    this.#disown("its additional parameters were not found");
  }

  /** Ask the server about the form as it is, once it has rested. */
  #validate(options) {
    const launch = this.#form.launchArguments();
    const wanted = !this.#element.hidden && Object.keys(options).length > 0;
    const asked = wanted ? JSON.stringify(launch) : "";
    if (asked === this.#asked) return;
    this.#asked = asked;
    clearTimeout(this.#timer);
    this.#call?.abort();
    // An answer to another question holds nothing back; it stays to be read until the next one.
    this.#verdict = { ...this.#verdict, stale: true };
    if (!wanted) return this.#show({ problem: null, warnings: [] });
    this.#timer = setTimeout(async () => {
      this.#call = new AbortController();
      const { signal } = this.#call;
      const verdict = await ask("v1/xavier/validate", { body: launch, signal });
      if (!signal.aborted) this.#show(verdict ?? { problem: null, warnings: [] });
    }, VALIDATE_AFTER_MS);
  }

  #show(verdict) {
    this.#verdict = verdict;
    setText(this.#parts.problem, verdict.problem ?? "");
    setText(this.#parts.warnings, verdict.warnings.join(" "));
    for (const name of [...Object.keys(BUDGETS), "xavier_share"]) {
      const wrong = Boolean(verdict.problem?.includes(`${name}=`));
      this.#parts[name].setAttribute("aria-invalid", String(wrong));
    }
    if (this.#element.contains(document.activeElement)) this.#revealSentence();
  }

  #revealSentence() {
    if (this.#verdict.problem) this.#parts.problem.scrollIntoView({ block: "nearest" });
  }

  /** Keep the form from sending what the server has just refused. */
  #holdBack(event) {
    if (!this.#verdict.problem || this.#verdict.stale) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    const wrong = this.#element.querySelector('[aria-invalid="true"]:not([hidden] *)');
    (wrong ?? this.#parts.switch).focus();
    this.#revealSentence();
  }

  #build() {
    const section = make("section", { className: "xavier-launch" });
    const head = make("div", { className: "xavier-launch-head" });
    const words = make("div");
    words.append(
      make("div", { className: "xavier-launch-title", id: `${this.#id}-title` }, "title"),
      make("p", { className: "xavier-launch-hint", id: `${this.#id}-hint` }, "hint"),
    );
    const toggle = make("button", { type: "button", className: "xavier-launch-switch" });
    toggle.setAttribute("role", "switch");
    toggle.setAttribute("aria-labelledby", `${this.#id}-title`);
    toggle.setAttribute("aria-describedby", `${this.#id}-hint ${this.#id}-problem`);
    toggle.append(make("span"));
    toggle.addEventListener("click", () => {
      this.#turn(toggle.getAttribute("aria-checked") !== "true");
    });
    head.append(words, toggle);
    const fields = make("div", { className: "xavier-launch-fields" });
    for (const name of Object.keys(BUDGETS)) fields.append(this.#buildBudget(name));
    fields.append(this.#buildShare());
    const problem = make("p", { className: "xavier-launch-problem", id: `${this.#id}-problem` });
    problem.setAttribute("role", "alert");
    const warnings = make("p", { className: "xavier-launch-warnings" });
    warnings.setAttribute("role", "status");
    section.append(head, fields, problem, warnings);
    Object.assign(this.#parts, { switch: toggle, fields, problem, warnings });
    section.setAttribute("aria-labelledby", `${this.#id}-title`);
    return section;
  }

  #buildBudget(name) {
    const input = make("input", { type: "text", placeholder: BUDGETS[name] });
    Object.assign(input, { autocomplete: "off", spellcheck: false });
    input.addEventListener("input", () => this.#form.setOptions({ [name]: input.value.trim() }));
    return this.#label(name, input);
  }

  #buildShare() {
    const select = make("select");
    for (const share of SHARES) {
      select.append(make("option", { value: share }, `share_${share || "default"}`));
    }
    select.addEventListener("change", () => this.#form.setOptions({ xavier_share: select.value }));
    return this.#label("xavier_share", select);
  }

  #label(name, control) {
    const field = make("div", { className: "xavier-launch-field" });
    control.id = `${this.#id}-${name}`;
    control.setAttribute("aria-describedby", `${control.id}-hint ${this.#id}-problem`);
    const hint = make("p", { className: "xavier-launch-hint", id: `${control.id}-hint` });
    hint.dataset.text = `${name}_hint`;
    field.append(make("label", { htmlFor: control.id }, name), control, hint);
    this.#parts[name] = control;
    return field;
  }
}

function make(tag, properties = {}, key = undefined) {
  const element = Object.assign(document.createElement(tag), properties);
  if (key) element.dataset.text = key;
  return element;
}

// Writing what is there already would move the caret, and wake whoever watches the page.
function setValue(control, value) {
  if (control.value.trim() !== value) control.value = value;
}

function setText(element, words) {
  if (element.textContent !== words) element.textContent = words;
}
