-- new_epoch: ends the current epoch and begins the next.
--
-- KEYS[1]  epoch
-- KEYS[2]  queue of requests
-- KEYS[3]  admitted requests
-- KEYS[4]  epochs (stream; its newest entry is the current epoch, with the assignment)
-- KEYS[5]  prefix of a request's keys
-- KEYS[6]  number of finished requests
-- KEYS[7]  totals: the sums of the counts of epochs that have ended (hash)
-- ARGV[1]  prefix of the keys of an epoch; "<prefix>:<epoch>:..." are deleted
-- ARGV[2]  seconds for which the ready lists keep the entry that ends ranks of the old epoch
-- ARGV[3]  assignment of the new epoch (opaque)
-- ARGV[4]  if the cluster has failed: how many clusters in a row may fail while they decode a
--          request, without a new token of it; empty: it has not failed
-- ARGV[5]  reason with which such a request ends
-- ARGV[6]  seconds for which the log keeps it from then on
-- Reply    the new epoch
-- Errors   none
--
-- Requests that the old epoch admitted and did not finish return to their places in the queue.
-- Ranks that still wait for a task or a request of the old epoch receive "STALE". The counts of the
-- old epoch are added to the totals.
--- @include "end_request"
--- @include "queue"

local epoch = redis.call('INCR', KEYS[1])
local old = ARGV[1] .. ':' .. (epoch - 1)
local graph = old .. ':graph'
for _, step in ipairs(redis.call('SMEMBERS', graph .. ':steps')) do
  redis.call('DEL', graph .. ':' .. step)
end
-- The head may have been notified without having joined.
redis.call('DEL', old .. ':arrived', old .. ':ready:0')
for _, rank in ipairs(redis.call('HKEYS', old .. ':ranks')) do
  local ready = old .. ':ready:' .. rank
  redis.call('DEL', ready)
  redis.call('RPUSH', ready, 'STALE')
  redis.call('EXPIRE', ready, ARGV[2])
end
local counted = redis.call('HGETALL', old .. ':counts')
for i = 1, #counted, 2 do
  redis.call('HINCRBY', KEYS[7], counted[i], counted[i + 1])
end
redis.call('DEL', graph, graph .. ':steps', old .. ':ranks', old .. ':kv_tokens', old .. ':statistics', old .. ':counts', old .. ':row_times', old .. ':computing', old .. ':closed', old .. ':link_addresses', old .. ':followers')
if ARGV[4] ~= '' then
  for _, id in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
    local request = KEYS[5] .. ':' .. id
    local known = redis.call('HMGET', request, 'length', 'stuck_at', 'stuck')
    local stuck = known[2] and known[2] == known[1] and known[3] + 1 or 1
    if not known[1] then -- Redis has evicted it
      redis.call('ZREM', KEYS[3], id)
    else
      redis.call('HSET', request, 'stuck_at', known[1], 'stuck', stuck)
      if stuck >= tonumber(ARGV[4]) then
        redis.call('ZREM', KEYS[3], id)
        end_request(request, request .. ':events', KEYS[6], known[1], ARGV[5], ARGV[6])
      end
    end
  end
end
redis.call('ZUNIONSTORE', KEYS[2], 2, KEYS[2], KEYS[3])
local queued = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for i = 1, #queued, 2 do
  join_queue(KEYS[2], queued[i], queued[i + 1], redis.call('HGET', KEYS[5] .. ':' .. queued[i], 'tenant'))
end
redis.call('DEL', KEYS[3])
redis.call('XADD', KEYS[4], 'MAXLEN', 1, epoch .. '-0', 'assignment', ARGV[3])
return epoch
