"""The OpenAI- and Anthropic-compatible endpoint, and workflows whose programs call it.

| module | what lives there |
|---|---|
| proxy, exchange | OpenAIProxy: the HTTP server; one request of an episode |
| session | one episode behind the endpoint: its URL and key, the record of its calls |
| chat, responses, anthropic, completions | a protocol each: from a request to a call, and from answers to a response |
| calls, answer_forms | what the protocols share: a call and its answers; grammars of answers |
| sdk_workflow | programs that arl starts |
| served_workflow, episodes_api, played_episodes | programs that arl does not start (`arl serve`) |
| verifiers_workflow, verifiers_harness | environments of the verifiers package |

It may import arl.workflow and what lies below that, but never arl.engine.
"""
