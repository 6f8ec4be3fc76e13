// triage.js: two calls at once with agent.all, and a tool with an effect at the end.
//   tidegate agent run runtime/guests/examples/triage.js --input '{"id": 7, "text": "it broke", "customer": "c1"}'
const { id, text, customer } = agent.input;
const draft = agent.llm(`Answer this ticket politely:\n${text}`);
const [owner, similar] = agent.all([
  agent.later.tool('crm__owner', { customer }),
  agent.later.tool('search__tickets', { text: draft }),
], { settle: true });
agent.checkpoint('facts gathered');
const to = owner.value?.email ?? 'support@example.com';
try {
  agent.tool('mail__send', { to, subject: `Ticket ${id}`, body: draft });
} catch (problem) {
  agent.log('not sent', { code: problem.code });
}
agent.emit({ id, to, similar: similar.value?.length ?? 0 });
