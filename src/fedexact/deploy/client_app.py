"""The Flower ClientApp: a site answers with what lies on its disk.

A process of its own runs this for every message, with the node's config as the site's.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedexact.deploy.flower import LIMIT, TOO_LARGE, from_record, to_record
from fedexact.deploy.messages import BAD_DATA, Content, RefusedError
from fedexact.deploy.site import Site, SiteConfig
from fedexact.errors import FedexactError

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One local computation."""
    return _reply(message, context)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Everything else: columns, moments, constants, sums at a point."""
    return _reply(message, context)


def _reply(message: Message, context: Context) -> Message:
    return Message(to_record(_answer(message, context)), reply_to=message)


def _answer(message: Message, context: Context) -> Content:
    try:
        content = from_record(message.content)
        answer = Site(SiteConfig.from_mapping(context.node_config)).answer(content)
    except RefusedError as refusal:
        return refusal.content()
    except FedexactError as error:
        return RefusedError(BAD_DATA, str(error)).content()
    if answer.size > LIMIT:  # no load for the SuperLink, which would take it
        return RefusedError(TOO_LARGE, f"{answer.size} bytes, allowed are {LIMIT}").content()
    return answer
