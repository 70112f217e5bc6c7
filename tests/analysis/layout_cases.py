"""Changes of a small module after which a value has no layout, with the error they must cause."""

from __future__ import annotations

from tests.analysis.replication_cases import cases_of

WRONG = cases_of("""
# a sum that is broadcast
- all_reduce %t {tp} => broadcast %t {tp}
!4 the broadcast at model.py:4 in mlp has a wrong operand
! its operand is a partial sum over tp, which only a reduction completes
# a sum that is scattered from a root
- %s = all_reduce %t {tp} : f32[B, 4]
+8 %c = collective_scatter %t {tp, dim=1} : f32[B, 2]
+ %s = all_gather %c {tp, dim=1} : f32[B, 4]
!8 the collective_scatter at model.py:8 has a wrong operand
! its operand is a partial sum over tp
# a reduction in front of a projection
- %t = linear %a
+8 %b = all_reduce %a {tp} : f32[B, 8]
+ %t = linear %b
!8 the all_reduce at model.py:8 takes the sum of different shards, those of the ranks of tp
# a softmax over shards
- %t = linear %a
+8 %w = softmax %a {dim=1} : f32[B, 8]
+ %t = linear %w
!8 the softmax at model.py:8 needs a dimension replicated that is sharded over tp
# shards joined by concat
- return %y
+8 %c = concat %h, %h {dim=1} : f32[B, 16]
+9 %g = all_gather %c {tp, dim=1} : f32[B, 32]
+ return %g
- (y: f32[B, 4] => (y: f32[B, 32]
!9 the all_gather at model.py:9 gathers over tp a dimension that is sharded over tp
# a weight of another axis
- [4, 16]).shard(1, tp) => [4, 16]).shard(1, dp)
!3 a dimension is sharded over tp in x and sharded over dp in weight
# sums on two roots
- %y = add %x, %s
+8 %g = reduce %t {tp} : f32[B, 4]
+9 %h1 = reduce %t {tp, root=1} : f32[B, 4]
+10 %w = add %g, %h1 : f32[B, 4]
+ %y = add %x, %s
!10 the add at model.py:10 has a wrong operand: its operands are on different roots
# a value of the root meets shards
- %y = add %x, %s
+8 %g = reduce %t {tp} : f32[B, 4]
+9 %w = tanh %g : f32[B, 4]
+10 %m = linear %w, @up : f32[B, 8]
+ %y = add %x, %s
!10 only its root has an operand, and other ranks have parts of another
# shards that were joined are split elsewhere
- %y = add %x, %s
+8 %c = concat %h, %h {dim=1} : f32[B, 16]
+9 %l, %m = split %c {dim=1, sizes=[4, 12]} : f32[B, 4], f32[B, 12]
+ %y = add %x, %s
!9 the split at model.py:9 splits shards of (8, 8) at other places
# a shard of other ranks
- %y = add %x, %s
+ %r = rank {axis="tp"} : i32[]
+ %z = reshape %x {shape=[B, 4, 1]} : f32[B, 4, 1]
+9 %g = gather %z, %r {dim=1} : f32[B, 1]
+ %y = add %x, %s
!9 the gather at model.py:9 takes a shard by the number of one of 2 ranks
# a lookup in a table of one rank
- [10, 4]).shard(0, tp) => [5, 4])
- %y = add %x, %s
+ %r = rank {axis="tp"} : i32[]
+ %i = sub %ids, %r : i32[B]
+9 %e = embedding %i, @table : f32[B, 4]
+ %y = add %x, %s
!9 its ids count from the first row of a shard, but its table is replicated
# a lookup without the rank
- %y = add %x, %s
+9 %e = embedding %ids, @table : f32[B, 4]
+ %y = add %x, %s
!9 the embedding at model.py:9 must know where the shard of a rank begins
# a lookup of the ids of others
-   func
+   weight @c : f32[8, 4] = random("c", 7, 0.5, [16, 4]).cyclic(0, 2).shard(0, tp)
+   func
- %y = add %x, %s
+9 %e = embedding %ids, @c : f32[B, 4]
+ %y = add %x, %s
!9 its table is cyclic over tp, but its ids are not for its rows
# rows that came back for others
-   func
+   weight @c : f32[8, 4] = random("c", 7, 0.5, [16, 4]).cyclic(0, 2).shard(0, tp)
+   func
- %y = add %x, %s
+ %r = rank {axis="tp"} : i32[]
+ %j = iota {size=4} : i32[4]
+ %i = add %j, %r : i32[4]
+ %e = embedding %i, @c : f32[4, 4]
+ %q = all_to_all %e {tp, split=0, concat=0} : f32[4, 4]
+9 %f = embedding %ids, %q : f32[B, 4]
+ %y = add %x, %s
!9 its table holds the rows of each rank of tp, its ids do not
# numbers over two axes
- %y = add %x, %s
+ %r = rank {axis="tp"} : i32[]
+ %d = rank {axis="dp"} : i32[]
+9 %f = add %r, %d : i32[]
+ %y = add %x, %s
!9 the add at model.py:9 mixes the numbers of a rank over different axes
# places in a shard are gathered
- %y = add %x, %s
+8 %v, %i = topk %a {k=2, dim=1} : f32[B, 2], i32[B, 2]
+9 %g = all_gather %i {tp, dim=1} : i32[B, 4]
+ %y = add %x, %s
!9 its operand counts from the first element of each rank of tp
# a number over two axes is broadcast over one
- %y = add %x, %s
+ %r = rank {axis="dp.tp"} : i32[]
+9 %b = broadcast %r {tp} : i32[]
+ %y = add %x, %s
!9 its operand differs over more axes than tp
# a shard is broadcast
- %y = add %x, %s
+9 %b = broadcast %a {tp} : f32[B, 8]
+ %y = add %x, %s
!9 its operand is sharded over tp, so that the other shards are lost
# shards that were joined are scattered
- %y = add %x, %s
+8 %c = concat %h, %h {dim=1} : f32[B, 16]
+9 %g = collective_scatter %c {axis="dp", dim=1, group_size=2} : f32[B, 8]
+ %y = add %x, %s
!9 the collective_scatter at model.py:9 scatters a dimension that is sharded over tp
# blocks of nothing
- %y = add %x, %s
+9 %g = all_to_all %x {tp, split=1, concat=1} : f32[B, 4]
+ %y = add %x, %s
!9 exchanges blocks of a dimension that holds none for the other ranks
# a weight of one rank
- [4, 16]).shard(1, tp) => [4, 8])
!3 a dimension is sharded over tp in x and replicated in weight
""")
