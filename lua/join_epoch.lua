-- join_epoch: adds a rank, or a worker that computes a part of one, to an epoch.
--
-- KEYS[1]  epoch
-- KEYS[2]  ranks of the epoch (hash: rank, process id), or followers (hash: worker, process id)
-- KEYS[3]  tokens for which they have KV slots (hash by rank)
-- KEYS[4]  times of their batches by rows (hash by rank)
-- KEYS[5]  their attention backend and other choices (hash by rank)
-- ARGV[1]  epoch of the caller
-- ARGV[2]  rank, or worker
-- ARGV[3]  process id
-- ARGV[4]  tokens for which it has KV slots; empty: it needs none
-- ARGV[5]  times of its batches by rows (opaque); empty: not measured
-- ARGV[6]  its attention backend and other choices (opaque); empty: it holds no model
-- Reply    1
-- Errors   STALE
--
-- One process holds a rank for the whole epoch. A process that replaces it does not know which
-- tasks it has completed and what it has sent, so it is refused as stale.
--- @include "fence"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
if redis.call('HSETNX', KEYS[2], ARGV[2], ARGV[3]) == 0 then
  local holder = redis.call('HGET', KEYS[2], ARGV[2])
  if holder ~= ARGV[3] then
    return refuse('STALE', 'rank ' .. ARGV[2] .. ' of epoch ' .. ARGV[1] .. ' was process ' .. holder)
  end
end
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[3], ARGV[2], ARGV[4])
end
if ARGV[5] ~= '' then
  redis.call('HSET', KEYS[4], ARGV[2], ARGV[5])
end
if ARGV[6] ~= '' then
  redis.call('HSET', KEYS[5], ARGV[2], ARGV[6])
end
return 1
