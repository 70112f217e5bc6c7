"""The module that the tests of instruments run pipelines over."""

TEXT = """module @m dims(B=1:2:4) {
  func @f(%x: f32[B, 4], %y: f32[B, 4]) -> (out: f32[B, 4], other: f32[B, 4]) {
    %a = neg %x : f32[B, 4] loc("model.py":3 "mlp")
    %b = neg %a : f32[B, 4]
    %c = add %b, %y : f32[B, 4] loc("model.py":5)
    %d = add %b, %y : f32[B, 4]
    %e = exp %d : f32[B, 4]
    return %c, %d
  }
}
"""
