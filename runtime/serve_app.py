"""The routes of a server."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from runtime.serve_answer import JsonReply, Service, answer, check_model
from runtime.serve_body import parse_chat, parse_completion
from runtime.serve_guard import Refusal, check_access
from runtime.serve_metrics import CONTENT_TYPE
from runtime.serve_model import ServedModel
from runtime.serve_reply import ChatReply, CompletionReply, error_object

__all__ = ["make_app"]


def make_app(service: Service) -> Starlette:
    """The application; its worker must be started."""

    async def completions(request: Request) -> Response:
        return await answer(service, request, parse_completion, CompletionReply)

    async def chat(request: Request) -> Response:
        return await answer(service, request, parse_chat, ChatReply)

    async def models(request: Request) -> Response:
        check_access(request, service.access)
        return JsonReply({"object": "list", "data": [_model_object(service.model)]})

    async def model(request: Request) -> Response:
        check_access(request, service.access)
        check_model(service, request.path_params["name"])
        return JsonReply(_model_object(service.model))

    async def health(request: Request) -> Response:
        well = service.worker.alive
        return JsonReply({"status": "ok" if well else "stopped"}, 200 if well else 503)

    async def metrics(request: Request) -> Response:
        check_access(request, service.access)
        worker = service.worker
        text = service.metrics.text(queued=worker.waiting, running=worker.running)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={Refusal: _refused, HTTPException: _no_such, Exception: _broke},
    )


def _model_object(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "onnx-mtp",
        "max_model_len": model.manifest.capacity,
    }


async def _refused(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    return JsonReply(refusal.object, refusal.status, headers=refusal.headers)


async def _no_such(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = HTTPStatus(error.status_code).phrase
    message = f"{request.method} {request.scope['path'][:100]}: {reason}"
    body = error_object(message, "invalid_request_error")
    return JsonReply(body, error.status_code, headers=error.headers)


async def _broke(request: Request, error: Exception) -> Response:
    """Answers; what broke goes to the log."""
    body = error_object("the server failed; its log says why", "server_error")
    return JsonReply(body, 500)
