--- @include "task"

-- complete_tasks(graph, ready, ids, payload, counts): records the tasks `ids` as complete with
-- `payload`, and after them every virtual task that this makes ready, with the payloads of
-- its predecessors; announces what became ready. Adds to `counts` (by step) how many tasks
-- were completed. The tasks exist, or belong to a step that is not submitted yet, and are
-- not complete.
local function complete_tasks(graph, ready, ids, payload, counts)
  local payloads = {}
  local i = 1
  while ids[i] do
    local id, result = ids[i], payloads[i] or payload
    local _, step = rank_and_step(id)
    local record = graph .. ':' .. step
    local waiting = redis.call('HGET', record, id .. '>')
    redis.call('HSET', record, id, 'D' .. result)
    counts[step] = (counts[step] or 0) + 1
    for successor in string.gmatch(waiting or '', '%S+') do
      local rank, its_step = rank_and_step(successor)
      local its = graph .. ':' .. its_step
      local known = redis.call('HMGET', its, successor, successor .. '$')
      local state = known[1]
      -- Its owner may have completed it already; then no rank waits for it.
      if string.sub(state, 1, 1) ~= 'D' then
        local gathered = (known[2] or '') .. result
        if redis.call('HINCRBY', its, successor .. '#', -1) > 0 then
          if result ~= '' then
            redis.call('HSET', its, successor .. '$', gathered)
          end
        elseif state == 'a' then
          redis.call('RPUSH', ready .. ':' .. rank, successor .. ' ' .. gathered)
        elseif state == 'v' then
          ids[#ids + 1] = successor
          payloads[#ids] = gathered
        end
      end
    end
    i = i + 1
  end
end
