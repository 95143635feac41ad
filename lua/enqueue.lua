-- enqueue: adds the requests of one user to the request log and to the queue. Belongs to no epoch.
--
-- KEYS[1]  epoch
-- KEYS[2]  counter of requests
-- KEYS[3]  queue of requests (includes/queue.lua)
-- KEYS[4]  prefix of a request's keys (see includes/request.lua)
-- ARGV[1]  prefix of the keys of an epoch, as of new_epoch
-- ARGV[2]  what the requests have in common (opaque); it is stored once
-- ARGV[3]  ticket: a random text that the caller has chosen for these requests
-- ARGV[4]  seconds for which the ticket is remembered
-- ARGV[5]  priority, a whole number below 2^20; of a tenant, lower values are taken first
-- ARGV[6]  tenant
-- ARGV[7..] for each request two: what it has of its own (opaque), and the length of its sequence at
--          the start
-- Reply    the id of the first request; those of the others follow
-- Errors   FULL  too little of Redis' memory is left
--
-- Idempotent: a second call with the same ticket replies the id that the first one made.
-- The head is notified (includes/notify_head.lua); the head of a new epoch reads the queue once
-- without a notification.
--- @include "memory"
--- @include "notify_head"
--- @include "queue"
--- @include "refuse"

local ticket = KEYS[4] .. ':tickets:' .. ARGV[3]
local known = redis.call('GET', ticket)
if known then
  return tonumber(known)
end
local used = memory_share()
if used > 0.75 and used < 1 then -- beyond, Redis refuses every write by itself
  return refuse('FULL', 'its memory for requests is full')
end
local count = (#ARGV - 6) / 2
local first = redis.call('INCRBY', KEYS[2], count) - count + 1
redis.call('SET', ticket, first, 'EX', ARGV[4])
redis.call('HSET', KEYS[4] .. ':' .. first .. ':shared', 'spec', ARGV[2], 'left', count)
for i = 0, count - 1 do
  local id, own, length = first + i, ARGV[7 + 2 * i], ARGV[8 + 2 * i]
  redis.call('HSET', KEYS[4] .. ':' .. id, 'own', own, 'shared', first, 'length', length, 'prompt', length, 'tenant', ARGV[6])
  -- Exact: a score has 53 bits.
  join_queue(KEYS[3], id, ARGV[5] * 2 ^ 32 + id, ARGV[6])
end
local epoch = redis.call('GET', KEYS[1])
if epoch then
  notify_head(ARGV[1], epoch)
end
return first
