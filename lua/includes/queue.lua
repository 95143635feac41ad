-- The queue: a sorted set of the ids of all requests that wait, and of each tenant's alone
-- ("<queue>:of:<tenant>"), with the same scores (includes/request.lua); and the set of the tenants
-- that have any ("<queue>:tenants").
--
-- join_queue(queue, id, score, tenant): puts a request in the queue.
-- leave_queue(queue, id, tenant) -> whether it was there. A tenant of false or nil is ''.
local function join_queue(queue, id, score, tenant)
  redis.call('ZADD', queue, score, id)
  redis.call('ZADD', queue .. ':of:' .. (tenant or ''), score, id)
  redis.call('SADD', queue .. ':tenants', tenant or '')
end

local function leave_queue(queue, id, tenant)
  local own = queue .. ':of:' .. (tenant or '')
  redis.call('ZREM', own, id)
  if redis.call('EXISTS', own) == 0 then
    redis.call('SREM', queue .. ':tenants', tenant or '')
  end
  return redis.call('ZREM', queue, id) == 1
end
