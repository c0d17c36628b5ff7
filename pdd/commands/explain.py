"""explain: the whole story of one request, in a few lines."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from pdd.commands.common import Globals, paint, print_json
from pdd.units import counted, show_duration

_MOST_LACKS = 6  # of one attempt that are printed; --json has more
_SECONDS = 5.0  # the daemon gives its prefillers one of them
_PARTS = (  # of the time to the first token, and what people call them
    ("queue_seconds", "queue"),
    ("reserve_seconds", "reserve"),
    ("failed_attempts_seconds", "failed attempts"),
    ("prefill_seconds", "prefill"),
    ("first_decode_seconds", "first decode"),
)
_OF_PREFILL = (
    ("prefill_queue_seconds", "queue"),
    ("prefill_compute_seconds", "compute"),
    ("exposed_seconds", "exposed transfer"),
)


def explain(options: Globals, request_id: str) -> None:
    document = options.client(_SECONDS).get(f"/v1/requests/{quote(request_id, safe='')}/explain", private=True)
    if options.json:
        print_json(document)
        return
    for line in lines(options, document):
        print(line)


def lines(options: Globals, doc: dict[str, Any]) -> list[str]:
    """The document for people."""
    client = f" ({doc['client_request_id']})" if doc["client_request_id"] else ""
    color = "red" if doc["error"] else None if doc["over"] else "yellow"
    group = "" if doc.get("group") is None else f" group {doc['group']}"
    out = [
        f"{doc['id']}{client}  {doc['kind']} {doc['state']} on {doc['node']}{group} ({doc['role']})  "
        f"{show_duration(doc['age_seconds'])}  {doc['prompt_tokens']} tokens in, {doc['output_tokens']} out",
        paint(options, doc["verdict"], color),
    ]
    if doc["ttft"] and (text := _ttft(doc["ttft"])):
        out.append(text)
    for attempt in doc["attempts"]:
        out += _attempt(attempt)
    if doc["push"]:
        out += _push("this node", doc["push"])
    for held in doc["pages"]:
        out.append(f"holds   {counted(held['pages'], 'page')}: {held['holder']}, {held['state']} for "
                   f"{show_duration(held['seconds'])}")
    out += [_step(step) for step in doc["steps"]]
    if doc["dump"]:
        out.append(f"dump    {doc['dump']}")
    return out


def _ttft(ttft: dict[str, Any]) -> str:
    parts = [f"{name} {show_duration(ttft[key])}" for key, name in _PARTS if ttft[key] is not None]
    inside = [f"{name} {show_duration(ttft[key])}" for key, name in _OF_PREFILL if ttft[key] is not None]
    if inside:
        parts = [f"{part} ({', '.join(inside)})" if part.startswith("prefill ") else part for part in parts]
    total = f" = {show_duration(ttft['total_seconds'])}" if ttft["total_seconds"] is not None else ""
    return f"ttft    {' + '.join(parts)}{total}" if parts else ""


def _attempt(attempt: dict[str, Any]) -> list[str]:
    key = f" key {attempt['key']:#08x}" if attempt["key"] is not None else ""
    via = f" via {attempt['via']}" if attempt["via"] else ""
    came = f"{attempt['arrived_units']}/{attempt['expected_units']} units"
    if attempt["first_unit_at_seconds"] is not None:
        came += f", first {_at(attempt['first_unit_at_seconds'])}, last {_at(attempt['last_unit_at_seconds'])}"
    why = f": {attempt['why']}" if attempt["why"] and attempt["why"] != attempt["peer"] else ""
    out = [f"attempt {attempt['attempt']} {attempt['peer'] or 'nobody'}{via}{key}  {attempt['state']} "
           f"({show_duration(attempt['state_seconds'])}){why}; {came}"]
    if attempt["fence_error"]:
        out.append(f"        not fenced: {attempt['fence_error']}")
    if attempt["push_unknown"]:
        out.append(f"        {attempt['push_unknown']}")
    if attempt["push"]:
        out += _push(attempt["peer"], attempt["push"])
    return out


def _push(name: str, push: dict[str, Any]) -> list[str]:
    spans = [f"{word} {show_duration(push[key])}" for key, word in
             (("queue_seconds", "queue"), ("compute_seconds", "compute"), ("send_seconds", "send"),
              ("exposed_seconds", "exposed")) if push[key] is not None]
    lost = "".join(f", {push[f'{word}_units']} {word}" for word in ("failed", "unknown") if push[f"{word}_units"])
    out = [f"        {name}: {push['state']} for {show_duration(push['state_seconds'])}, "
           f"{push['computed_tokens']}/{push['tokens']} tokens in {counted(push['chunks'], 'chunk')}, "
           f"{push['ok_units']}/{push['units']} units written{lost}" + (f"; {', '.join(spans)}" if spans else "")]
    if push["why"]:
        out.append(f"        {push['why']}")
    for lack in push["lacks"][:_MOST_LACKS]:
        out.append(f"        {_lack(lack)}")
    more = len(push["lacks"]) - _MOST_LACKS + push["more_lacks"]
    if more > 0:
        out.append(f"        and {more} more (--json)")
    return out


def _lack(lack: dict[str, Any]) -> str:
    one = lack["first_layer"] == lack["last_layer"]
    layers = f"layer {lack['first_layer']}" if one else f"layers {lack['first_layer']}-{lack['last_layer']}"
    nic = f" NIC {lack['nic']}" if lack["nic"] else ""
    return (f"{lack['what']:12} chunk {lack['chunk']} {layers} rank {lack['from_rank']}->{lack['to_rank']}{nic}: "
            f"{counted(lack['units'], 'unit')}, {show_duration(lack['seconds'])}")


def _step(step: dict[str, Any]) -> str:
    way = f"{step['before']} -> {step['state']}" if step["before"] else step["state"]
    whose = {"attempt": f"attempt {step['attempt']}", "link": f"link {step['of']}"}.get(step["kind"], step["kind"])
    known = [f"{name} {step[name]}" for name in ("peer", "units", "step") if step[name] is not None]
    why = f": {step['why']}" if step["why"] and step["why"] != step["peer"] else ""
    return f"{_at(step['at_seconds']):>9} {whose} {way}{why}" + (f" ({', '.join(known)})" if known else "")


def _at(seconds: float) -> str:
    """A place in time, to the millisecond however late it is."""
    size = abs(seconds)
    return f"{'-' if seconds < 0 else '+'}{show_duration(size) if size < 1 else f'{size:.3f}s'}"
