"""The models of the ranks of a stage: one graph, with the weights, positions and groups of each."""

from __future__ import annotations

import numpy as np
from onnx.onnx_ml_pb2 import ModelProto, TensorProto

from irc.backends.onnx.emitter import Emitter
from irc.backends.onnx.graph import COLLECTIVE, entries, tensor
from irc.backends.onnx.storage import Storage
from irc.ir.mesh import Mesh
from irc.ir.types import Axes
from irc.onnx_format.module_text import CHECKSUM, TEXT, checksum, text_of


class Template:
    """The model of a stage without weights, positions and groups, which differ between ranks."""

    def __init__(self, emitter: Emitter, storage: Storage) -> None:
        self.mesh, self.positions = emitter.module.mesh, emitter.graph.positions
        self.groups = emitter.graph.groups
        self._text = text_of(emitter.module, emitter.function, emitter.held)
        self._model = emitter.graph.model(emitter.module.name, {"irc.module": emitter.module.name})
        self._weights = {
            rank: [storage.place(form, name, rank) for name, form in emitter.forms.items()]
            for rank in emitter.ranks
        }

    def model(self, rank: int) -> ModelProto:
        """The model of one rank, once the storage is written."""
        model = ModelProto()
        model.CopyFrom(self._model)
        model.metadata_props.add(key="irc.rank", value=str(rank))
        own = self.placed(rank)
        own |= {name: self._position(name, axes, rank) for name, axes in self.positions.items()}
        for proto in model.graph.initializer:
            if proto.name in own:
                proto.CopyFrom(own[proto.name])
        self.fill_groups(model, rank)
        return self._with_text(model)

    def shared(self) -> ModelProto:
        """The model that all ranks have in common, where their weights are inputs."""
        model = ModelProto()
        model.CopyFrom(self._model)
        return self._with_text(model)

    def _with_text(self, model: ModelProto) -> ModelProto:
        """The model with the text of its module, so that it is read back exactly."""
        own_checksum = checksum(model.graph, lambda tensor: tensor.raw_data)
        model.metadata_props.extend(entries({TEXT: self._text, CHECKSUM: own_checksum}))
        return model

    def placed(self, rank: int) -> dict[str, TensorProto]:
        """The located initializers of a rank's weights, by their names in the model."""
        return {proto.name: proto for proto in self._weights[rank]}

    def fill_groups(self, model: ModelProto, rank: int) -> None:
        """Write the ranks of its group into every DistCollective."""
        if not self.groups:
            return
        nodes = (node for node in model.graph.node if node.op_type == COLLECTIVE)
        for node, axes in zip(nodes, self.groups, strict=True):
            for attribute in node.attribute:
                if attribute.name == "groups":
                    attribute.ints.extend(group_of(self.mesh, axes, rank))

    def _position(self, name: str, axes: Axes, rank: int) -> TensorProto:
        proto = tensor(np.array(self.mesh.index(rank, axes), np.int32))
        proto.name = name
        return proto


def group_of(mesh: Mesh, axes: Axes, rank: int) -> list[int]:
    """The ranks that communicate with `rank` over `axes`, in the order of their shards."""
    return next(group for group in mesh.groups(axes) if rank in group)
