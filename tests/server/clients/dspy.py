import asyncio

import dspy


async def streamed(program):
    parts = [part async for part in program(question=STRUCTURED) if not isinstance(part, dspy.Prediction)]
    return "".join(part.choices[0].delta.content or "" for part in parts)


def weather(city: str) -> str:
    """The weather."""
    return RESULT[city]


lm = dspy.LM("openai/demo", api_base=BASE, api_key="none", cache=False, max_tokens=400, num_retries=0)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
person = dspy.Predict("question -> name: str, age: int")
found = {"chat": lm(CHAT)[0], "structured": dict(person(question=STRUCTURED))}
found["tool"] = dspy.ReAct("question -> answer", tools=[weather])(question=TOOL).answer
found["stream"] = json.loads(asyncio.run(streamed(dspy.streamify(person))))
