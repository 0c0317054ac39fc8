"""Chat: templates, tools, JSON, and OpenAI's dicts."""

from pylongctx.chat.formats import register_chat_completion_handler, unregister_chat_completion_handler

__all__ = ["register_chat_completion_handler", "unregister_chat_completion_handler"]
