// research.js: asks a model for questions, a tool for sources, and the model for a summary.
// Plain synchronous JavaScript; every agent.* call may park the task, and the loop may be preempted.
//   tidegate agent run runtime/guests/examples/research.js --input '{"topic": "tides"}'
// Tools are named SERVER__TOOL, as the gateway's policy names its servers:
//   --input '{"topic": "tides", "tool": "time__get_current_time", "args": {"timezone": "UTC"}}'
const { topic = 'tides', rounds = 3, tool = 'search__documents', args } = agent.input ?? {};
const notes = [];

function weigh(text) { // something to compute between calls
  let hash = 7;
  for (let i = 0; i < 20000; i++) hash = (hash * 31 + text.charCodeAt(i % text.length)) % 1000003;
  return hash;
}

for (let round = 1; round <= rounds; round++) {
  const question = agent.llm(`Round ${round}: one open question about ${topic}.`);
  let sources = [];
  try {
    sources = agent.tool(tool, args ?? { query: question });
  } catch (problem) {
    agent.log('no sources', { round, code: problem.code });
  }
  notes.push({ round, question, sources, weight: weigh(question) });
  agent.put('notes', notes);
  console.log(`round ${round}: ${question}`);
}

agent.checkpoint('notes gathered');
const summary = agent.llm(`Summarize: ${notes.map((note) => note.question).join('; ')}`);
agent.emit({ topic, summary, rounds: notes.length });
