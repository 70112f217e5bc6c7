"""The intermediate representation: types, dims, meshes, the graph, declarations, the verifier."""
