-- attach: a rank, or a worker that computes beside one, takes part in an epoch.
--
-- KEYS[1]  epoch
-- KEYS[2]  ranks of the epoch (hash: rank, process id), or followers (hash: worker, process id)
-- KEYS[3]  tokens that their KV holds (hash by rank)
-- KEYS[4]  how long their batches take (hash by rank)
-- KEYS[5]  how they compute (hash by rank)
-- ARGV[1]  epoch of the caller
-- ARGV[2]  rank, or worker
-- ARGV[3]  process id
-- ARGV[4]  tokens that its KV holds; nothing: it needs none
-- ARGV[5]  how long its batches take (opaque); nothing: it does not know
-- ARGV[6]  how it computes (opaque); nothing: it holds no model
-- Reply    1
-- Errors   STALE
--
-- One process holds a rank for the whole epoch. Who was started in its place cannot know what
-- it has completed and sent, so the epoch is over for it before it begins.
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
