-- split_words(text, skip) -> the words of a text that spaces separate, without the first `skip`.
local function split_words(text, skip)
  local found, position = {}, 0
  for word in string.gmatch(text, '%S+') do
    position = position + 1
    if position > skip then
      found[#found + 1] = word
    end
  end
  return found
end
