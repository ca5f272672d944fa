"""PyTriton's model with errors that a client may see: an HTTP status and one sentence instead of 500 and a traceback.

PyTriton 0.7 answers every exception of an inference function with HTTP 500 and the traceback, paths included, and knows no
other way. The code it sends into Triton's Python backend is a file, though (``proxy/model.py``), and the backend itself can
answer with a status per response. So a few lines are appended to that file: an output named ``error`` becomes such an
answer, and whatever else goes wrong in there becomes a bare sentence. An empty BYTES tensor is refused in there too, because
PyTriton cannot pass one on. The pin in requirements/server.txt names 0.7.0;
tests/integration/test_critic_errors.py holds this to it.
"""

from pytriton.models.model import Model

from nemo_style_rlhf.critic_service.protocol import ERROR, Code, bytes_tensor

_APPENDIX = f'''

_wrap_plain_response = _wrap_response


def _wrap_response(response, requested_outputs_names, model_outputs_dict):
    if response.data is not None and "{ERROR.name}" in response.data:
        kind, _, sentence = response.data["{ERROR.name}"].item(0).decode("utf-8").partition(" ")
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(sentence, getattr(pb_utils.TritonError, kind)))
    return _wrap_plain_response(response, requested_outputs_names, model_outputs_dict)


class TritonPythonModel(TritonPythonModel):
    def execute(self, triton_requests):
        for tensor in (tensor for request in triton_requests for tensor in request.inputs()):
            if self._model_inputs[tensor.name()]["data_type"] == "TYPE_STRING" and 0 in tensor.shape():
                sentence = f"[{Code.INVALID.wire}] {{tensor.name()}} is empty: send at least one text"
                return self._refuse(triton_requests, sentence, pb_utils.TritonError.INVALID_ARG)
        try:
            return super().execute(triton_requests)
        except pb_utils.TritonModelException as error:
            LOGGER.error(str(error))
            sentence = "[{Code.INTERNAL.wire}] the server could not process the request; its log says more"
            return self._refuse(triton_requests, sentence, pb_utils.TritonError.INTERNAL)

    def _refuse(self, triton_requests, sentence, kind):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError(sentence, kind)) for _ in triton_requests]
'''


class ModelWithCleanErrors(Model):  # type: ignore[misc]
    """Deployed in place of :class:`pytriton.models.model.Model`."""

    def get_proxy_model_files(self) -> dict[str, bytes]:
        files: dict[str, bytes] = super().get_proxy_model_files()
        files[f"file:{self.model_version}/model.py"] += _APPENDIX.encode()
        return files


def error_tensor(code: Code, text: str):  # type: ignore[no-untyped-def]
    """The ``error`` output that the appended lines understand."""
    return bytes_tensor(f"{code.triton_kind} {text}".encode())
