// Waiting, and times in words.

export const seconds = (count, signal) => new Promise((resolve, reject) => {
  signal?.throwIfAborted();
  const timer = setTimeout(resolve, count * 1000);
  signal?.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
});

export const duration = (s) => s >= 1 ? `${s.toFixed(2)} s` : `${(s * 1000).toFixed(s < 0.00995 ? 1 : 0)} ms`;
