// Xinference's launch form, as its own code sees it.
//
// Everything of the web UI's inside that we depend on is in this file and in panel_link.js.
// The form keeps its values in a store. Launch arguments without a field of their own are rows
// {key, value} under "kwargs", which the dialog shows as "Additional Parameters"; launching,
// autostart, the history of launches and "copy command line" all read them there. So our options
// live in those rows and nowhere else: the form sends, keeps and restores them as it does its own.

/** Our launch options, as in docs/options.md; the first is the switch. */
export const OPTIONS = [
  "enable_xavier_gpu",
  "xavier_gpu_budget",
  "xavier_cpu_budget",
  "xavier_share",
  "xavier_min_fetch",
  "xavier_lease_ttl",
  "xavier_policy",
  "xavier_store_decode",
  "xavier_self_check",
  "xavier_receipts",
];
export const SWITCH = OPTIONS[0];

const ROWS = "kwargs";
const STORE_METHODS = ["getFieldValue", "getFieldsValue", "setFieldValue", "subscribe"];
/** React components between the <form> element and the one that was given the store. */
const MOST_PARENTS = 12;

/** The form behind `element`, a <form> of the page, or null when it is none that we know. */
export function findForm(element) {
  const key = Object.keys(element).find((name) => name.startsWith("__reactFiber$"));
  let fiber = key && element[key];
  for (let parents = 0; fiber && parents < MOST_PARENTS; parents += 1, fiber = fiber.return) {
    const store = fiber.memoizedProps?.form;
    if (store && STORE_METHODS.every((method) => typeof store[method] === "function")) {
      return new HostForm(store, fiber.memoizedProps.onUserChange);
    }
  }
  return null;
}

class HostForm {
  /** `changed` tells the dialog that the user changed something, so that it keeps it. */
  constructor(store, changed) {
    this.store = store;
    this.changed = typeof changed === "function" ? changed : () => {};
  }

  /** Call `listener` after every change; returns what ends that. */
  subscribe(listener) {
    return this.store.subscribe(listener);
  }

  /** Whether this is a launch by vLLM of a language model: the only place for our switch. */
  isVllm() {
    const { model_type: type, model_engine: engine } = this.store.getFieldsValue();
    return type === "LLM" && String(engine ?? "").toLowerCase() === "vllm";
  }

  /** Whether an engine was chosen that cannot go with our options. */
  isOtherEngine() {
    const engine = this.store.getFieldValue("model_engine");
    return Boolean(engine) && !this.isVllm();
  }

  /** Our options in the form: name -> text. */
  options() {
    const rows = this.#rows().filter((row) => OPTIONS.includes(optionName(row)));
    return Object.fromEntries(rows.map((row) => [optionName(row), String(row.value ?? "")]));
  }

  /** Set options to texts; an empty one goes away. */
  setOptions(changes) {
    const left = { ...changes };
    const rows = [];
    for (const row of this.#rows()) {
      const name = optionName(row);
      if (!(name in changes)) rows.push(row);
      else if (left[name]) rows.push({ ...row, value: left[name] });
      delete left[name]; // a second row of the same option goes away
    }
    for (const [key, value] of Object.entries(left)) if (value) rows.push({ key, value });
    this.store.setFieldValue(ROWS, rows);
    this.changed();
  }

  /** The launch request that the form would send, as far as our checks read it. */
  launchArguments() {
    const { [ROWS]: rows, ...values } = this.store.getFieldsValue();
    const launch = { ...values, ...mapping(rows, typed), envs: mapping(values.envs, String) };
    if (typeof launch.enable_virtual_env !== "boolean") delete launch.enable_virtual_env;
    if (values.replica_placement_mode !== "custom") delete launch.replica_config;
    return Object.fromEntries(Object.entries(launch).filter(([, value]) => value !== ""));
  }

  #rows() {
    const rows = this.store.getFieldValue(ROWS);
    return Array.isArray(rows) ? rows : [];
  }
}

function optionName(row) {
  return String(row?.key ?? "").trim().replaceAll("-", "_");
}

function mapping(rows, convert) {
  const named = (Array.isArray(rows) ? rows : []).filter((row) => String(row?.key ?? "").trim());
  return Object.fromEntries(named.map((row) => [String(row.key).trim(), convert(row.value)]));
}

/** What the form makes of a row's text when it sends it. */
function typed(value) {
  const word = String(value ?? "").trim();
  const lower = word.toLowerCase();
  if (lower === "none") return null;
  if (lower === "true" || lower === "false") return lower === "true";
  return word === "" || Number.isNaN(Number(word)) ? word : Number(word);
}
