// Texts of our parts of the web UI, in the languages of Xinference's own that we speak.
//
// The page says its language in <html lang>: en, zh, zh-TW, ko or ja. Others get English.
// Sentences about refused values come from the server and are English, as everywhere in the API.

const TEXTS = {
  en: {
    title: "GPU-first KV cache (Xavier)",
    hint: "Keeps the KV cache of prompts on the GPU, then in host memory, and shares it between replicas.",
    xavier_gpu_budget: "GPU budget",
    xavier_gpu_budget_hint: "Per replica, such as 2GiB. 0: no GPU tier.",
    xavier_cpu_budget: "CPU budget",
    xavier_cpu_budget_hint: "Per replica, such as 16GiB. 0: no CPU tier.",
    xavier_share: "Share with",
    xavier_share_hint: "Who may read what this model keeps.",
    share_default: "This model's replicas",
    share_off: "Nobody",
    share_cluster: "The whole cluster",
    panel: "KV cache",
    panel_hint: "Open the KV cache panel of this model",
  },
  zh: {
    title: "GPU 优先 KV 缓存（Xavier）",
    hint: "将提示词的 KV 缓存优先保留在 GPU，其次保留在主机内存，并在副本之间共享。",
    xavier_gpu_budget: "GPU 预算",
    xavier_gpu_budget_hint: "按副本计，例如 2GiB；0 表示不使用 GPU 层。",
    xavier_cpu_budget: "CPU 预算",
    xavier_cpu_budget_hint: "按副本计，例如 16GiB；0 表示不使用 CPU 层。",
    xavier_share: "共享范围",
    xavier_share_hint: "谁可以读取此模型保留的缓存。",
    share_default: "此模型的副本",
    share_off: "不共享",
    share_cluster: "整个集群",
    panel: "KV 缓存",
    panel_hint: "打开此模型的 KV 缓存面板",
  },
  "zh-TW": {
    title: "GPU 優先 KV 快取（Xavier）",
    hint: "將提示詞的 KV 快取優先保留在 GPU，其次保留在主機記憶體，並在副本之間共享。",
    xavier_gpu_budget: "GPU 預算",
    xavier_gpu_budget_hint: "按副本計，例如 2GiB；0 表示不使用 GPU 層。",
    xavier_cpu_budget: "CPU 預算",
    xavier_cpu_budget_hint: "按副本計，例如 16GiB；0 表示不使用 CPU 層。",
    xavier_share: "共享範圍",
    xavier_share_hint: "誰可以讀取此模型保留的快取。",
    share_default: "此模型的副本",
    share_off: "不共享",
    share_cluster: "整個叢集",
    panel: "KV 快取",
    panel_hint: "開啟此模型的 KV 快取面板",
  },
};

/** The text named `key` in the page's language. */
export function text(key) {
  return (TEXTS[document.documentElement.lang] ?? TEXTS.en)[key];
}
