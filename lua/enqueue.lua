-- enqueue: adds a request to the request log and to the queue. Belongs to no epoch.
--
-- KEYS[1]  counter of requests
-- KEYS[2]  queue of requests (list of ids)
-- KEYS[3]  arrivals (stream; wakes who waits for a request)
-- KEYS[4]  prefix of a request's keys (see includes/request.lua)
-- ARGV[1]  what was asked for (opaque)
-- ARGV[2]  length of the sequence at the start
-- Reply    the request's id
-- Errors   none

local id = redis.call('INCR', KEYS[1])
redis.call('HSET', KEYS[4] .. ':' .. id, 'asked', ARGV[1], 'length', ARGV[2])
redis.call('RPUSH', KEYS[2], id)
redis.call('XADD', KEYS[3], 'MAXLEN', 1, id .. '-0', 'request', id)
return id
