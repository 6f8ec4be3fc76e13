// The JavaScript SDK: a prelude over /dev/agent. Every call may park the task for days; to the
// script it is a plain synchronous call. Errors are AgentError with a `code` and `retryable`.
globalThis.AgentError = class AgentError extends Error {
  constructor(code, message, retryable) {
    super(message);
    this.name = 'AgentError';
    this.code = code;
    this.retryable = Boolean(retryable);
  }
};

globalThis.agent = (() => {
  const channel = std.open('/dev/agent', 'r+');
  const open = (reply) => {
    if (reply.error) {
      throw new AgentError(reply.error.code, reply.error.message, reply.error.retryable);
    }
    return reply.ok;
  };
  const send = (op, args) => {
    channel.puts(JSON.stringify({ v: 1, op, args }) + '\n');
    channel.flush();
    return JSON.parse(channel.getline());
  };
  const call = (op, args) => open(send(op, args));
  const messages = (prompt) =>
    (Array.isArray(prompt) ? prompt : [{ role: 'user', content: String(prompt) }]);
  const result = (ok) => (ok.structured ?? ok.content);

  // Calls not yet made: for agent.all, which sends them together.
  const later = {
    llm: (prompt, options = {}) =>
      ({ op: 'llm.chat', args: { messages: messages(prompt), ...options }, take: (ok) => ok.text }),
    chat: (prompt, options = {}) =>
      ({ op: 'llm.chat', args: { messages: messages(prompt), ...options }, take: (ok) => ok }),
    raw: (dialect, body) => ({ op: 'llm.raw', args: { dialect, body }, take: (ok) => ok }),
    tool: (name, args = {}) => ({ op: 'tool.call', args: { name, args }, take: result }),
    get: (key) => ({ op: 'memory.get', args: { key }, take: (ok) => ok.value }),
    put: (key, value, options = {}) =>
      ({ op: 'memory.put', args: { key, value, ...options }, take: (ok) => ok.version }),
  };
  const direct = Object.fromEntries(
    Object.entries(later).map(([name, make]) => [name, (...given) => {
      const request = make(...given);
      return request.take(call(request.op, request.args));
    }]),
  );

  return {
    ...direct,
    later,
    // One round trip for all; an error of one throws when `settle` is not asked for.
    all: (requests, { settle = false } = {}) => {
      if (requests.length === 0) return [];
      const calls = requests.map(({ op, args }) => ({ op, args }));
      return call('batch', { calls }).map((reply, n) => {
        if (settle && reply.error) return { error: reply.error };
        const value = requests[n].take(open(reply));
        return settle ? { value } : value;
      });
    },
    sleep: (ms) => call('sleep', { ms }),
    checkpoint: (label) => call('checkpoint', { label }),
    lock: (name, { ttl_ms = 60000, wait_ms = 0 } = {}) => call('lock.acquire', { name, ttl_ms, wait_ms }),
    unlock: (name, token) => call('lock.release', { name, token }),
    emit: (data) => call('emit', { data }),
    log: (message, fields = {}, level = 'info') => call('log', { level, message: String(message), fields }),
    now: () => Math.floor(call('now', {}) / 1e6),
    info: () => call('task.info', {}),
    get input() { return JSON.parse(std.loadFile('/agent/input.json')); },
  };
})();
