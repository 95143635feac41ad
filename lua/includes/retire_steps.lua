-- retire_steps(graph, counts, floor, last): subtracts the completed tasks in `counts` (by step)
-- from the number of open tasks of their steps, and deletes the records of the oldest steps while
-- they have no open task. An edge from a deleted step is therefore satisfied. `floor` and `last` are those of the graph; nil if nothing was submitted.
local function retire_steps(graph, counts, floor, last)
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
