-- complete: records tasks as complete, and announces what that makes ready.
--
-- KEYS[1]  epoch
-- KEYS[2]  graph (see includes/task.lua; keys derived from it share its hash tag)
-- KEYS[3]  ready lists
-- ARGV[1]  epoch of the caller
-- ARGV[2]  most steps that may have a record at once
-- ARGV[3]  payload, the result of each of the tasks
-- ARGV[4..] task ids
-- Reply    1
-- Errors   STALE
--          GRAPH  a task that is complete already, or is not one of its submitted step, or is
--                 of a step far ahead of what was submitted
--
-- A task may be completed before its predecessors are, and before its step is submitted; it is then
-- never announced. The payloads of predecessors are concatenated in the order of completion.
--- @include "fence"
--- @include "task"
--- @include "complete_tasks"
--- @include "retire_steps"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
local graph = KEYS[2]
local bounds = redis.call('HMGET', graph, 'floor', 'last')
local floor, last = tonumber(bounds[1]), tonumber(bounds[2])

local ids, early = {}, {}
for i = 4, #ARGV do
  local id = ARGV[i]
  local rank, step = rank_and_step(id)
  if not step then
    return refuse('GRAPH', id .. ' is not the id of a task')
  end
  local number = tonumber(step)
  local state = redis.call('HGET', graph .. ':' .. step, id)
  local twice = state and string.sub(state, 1, 1) == 'D' or floor and number < floor or ids[id]
  if twice then
    return refuse('GRAPH', 'task ' .. id .. ' is complete already')
  end
  if not state then
    if last and number <= last then
      return refuse('GRAPH', 'task ' .. id .. ' is not one of step ' .. step)
    end
    if last and number - floor >= tonumber(ARGV[2]) then
      return refuse('GRAPH', 'task ' .. id .. ' is far ahead of the last submitted step ' .. last)
    end
    early[#early + 1] = step
  end
  ids[#ids + 1] = id
  ids[id] = true
end

for _, step in ipairs(early) do
  redis.call('SADD', graph .. ':steps', step)
end
local counts = {}
complete_tasks(graph, KEYS[3], ids, ARGV[3], counts)
retire_steps(graph, counts, floor, last)
return 1
