# ruff: noqa: INP001, T201
"""triage.py: plain Python on MicroPython (experimental); every agent.* call may park the task.

tidegate agent run runtime/guests/examples/triage.py --input '{"text": "it broke", "customer": "c"}'
"""

import agent  # type: ignore[import-not-found]

ticket = agent.input
draft = agent.llm("Answer this ticket politely:\n" + ticket["text"])
try:
    owner = agent.tool("crm__owner", customer=ticket["customer"])
except agent.Error as problem:
    owner = {"email": "support@example.com"}
    agent.log("no owner", code=problem.code)
words = draft.lower().split()
print("most used:", sorted(set(words), key=lambda w: -words.count(w))[:3])
agent.emit({"to": owner["email"], "words": len(words)})
