-- retire(graph, counts, floor, last): takes the completed tasks in `counts` (by step) off what
-- is left of their steps, and deletes the records of the oldest steps as far as nothing of them
-- is left. No later task can lack a predecessor there, so an edge from a deleted step is
-- satisfied. `floor` and `last` are those of the graph; nil if nothing was submitted.
local function retire(graph, counts, floor, last)
  local over = false
  for step, count in pairs(counts) do
    if last and tonumber(step) <= last then
      over = redis.call('HINCRBY', graph .. ':' .. step, 'left', 0 - count) == 0 or over
    end
  end
  if not over then
    return
  end
  local step = floor
  while redis.call('HGET', graph .. ':' .. step, 'left') == '0' do
    redis.call('DEL', graph .. ':' .. step)
    redis.call('SREM', graph .. ':steps', step)
    step = step + 1
  end
  if step > floor then
    redis.call('HSET', graph, 'floor', step)
  end
end
